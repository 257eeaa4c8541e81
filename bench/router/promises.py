"""Whether retry times are kept: 100 equal requests at three routers, which each client chooses at
random, each time. In the simulator, with the routers' own cores.

    python -m bench.router.promises [--seeds 4] [--routers 3]

One prefill and one decode worker. Either prompts are the bottleneck (each of its own, 10 a second),
or the places of the decode worker (all prompts are the same one, 8 sequences a second). A promise
is kept if its client, which comes back when it was told to, is admitted; each comes back once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from math import inf

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import TraceRequest
from kvrelay.types import value

REQUESTS = 100
SHARES = (1.0, 0.5)
"""Of the clients, how many come back."""
EVERY_S = (0.01, 0.03, 0.05)
BOTTLENECKS = ("prompts", "places")
PROFILE = {
    "kind": "linear",
    "prefill_overhead_s": 0.01,
    "prefill_token_s": 0.00002,
    "prefill_pair_s": 0.0,
    "decode_knots": [[1, 0.01], [256, 0.01]],
    "decode_kv_token_s": 0.0,
}
SETTINGS = (
    "workers.0.replicas=1",
    "workers.1.replicas=1",
    "simulation.slo.told=true",
    "simulation.slo.ttft=1s",
    "simulation.slo.tpot=100ms",
    "simulation.retries=1",
    "simulation.balancing=random",
    "simulation.block_size=512",
    f"simulation.profile={json.dumps(PROFILE).replace('2e-05', '0.00002')}",
)


@value
class Offer:
    bottleneck: str
    every_s: float
    share: float
    routers: int = 3
    seed: int = 0
    promise_sent: bool = True

    def settings(self) -> Iterator[str]:
        yield from SETTINGS
        yield f"router.replicas={self.routers}"
        yield f"simulation.seed={self.seed}"
        yield f"simulation.retrying_share={self.share}"
        yield f"simulation.promise_sent={str(self.promise_sent).lower()}"
        if self.bottleneck == "places":
            yield "scheduler.max_running_requests=8"

    def requests(self) -> list[TraceRequest]:
        same = self.bottleneck == "places"
        return [
            TraceRequest(
                arrival_s=self.every_s * number,
                input_tokens=4000,
                output_tokens=100 if same else 20,
                hash_ids=tuple(range(8)) if same else None,
            )
            for number in range(REQUESTS)
        ]


@value
class Became:
    """Of the requests: how many came back, were admitted then, were done, and had their first token
    in time. As the routers count: promises that were `told`, `claimed`, and `expired`."""

    back: int = 0
    kept: int = 0
    done: int = 0
    good: int = 0
    told: int = 0
    claimed: int = 0
    expired: int = 0

    def __add__(self, other: Became) -> Became:
        return Became(
            back=self.back + other.back,
            kept=self.kept + other.kept,
            done=self.done + other.done,
            good=self.good + other.good,
            told=self.told + other.told,
            claimed=self.claimed + other.claimed,
            expired=self.expired + other.expired,
        )

    @property
    def share(self) -> float:
        return self.kept / self.back


def offer(offered: Offer) -> Became:
    config = load_config(None, map(Override.parse, offered.settings()))
    simulation = ClusterSimulation(config, offered.requests(), Scale())
    outcomes = simulation.run().outcomes
    back = [one for one in outcomes if one.retries]
    done = [one for one in outcomes if one.done]
    promises = [router.core.state.promises for router in simulation.routers]
    for one in promises:
        one.expire(inf)
    return Became(
        back=len(back),
        kept=sum(one.admitted_s is not None for one in back),
        done=len(done),
        good=sum(one.ttft_s is not None and one.ttft_s <= 1.0 for one in done),
        told=sum(one.told for one in promises),
        claimed=sum(one.kept + one.broken + one.given_up for one in promises),
        expired=sum(one.expired - one.elsewhere for one in promises),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--routers", type=int, default=3)
    options = parser.parse_args()
    print("| bottleneck | one comes every | come back | kept | done | in time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for bottleneck, share, every_s in product(BOTTLENECKS, SHARES, EVERY_S):
        found = Became()
        for seed in range(options.seeds):
            found += offer(
                Offer(
                    bottleneck=bottleneck,
                    every_s=every_s,
                    share=share,
                    routers=options.routers,
                    seed=seed,
                )
            )
        kept = f"{found.kept} of {found.back}, {found.share:.1%}"
        cells = (bottleneck, f"{1000 * every_s:g} ms", f"{share:.0%}", kept, found.done, found.good)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
