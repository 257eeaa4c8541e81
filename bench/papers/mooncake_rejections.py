"""Mooncake's early rejection: how much of a trace is rejected that comes faster than it is served.

    python -m bench.papers.mooncake_rejections conversation_trace.jsonl [--decode 1 --tpot 0.06]

Paper: Mooncake (Qin et al., arXiv 2407.00079), table 3: of 23,000 requests at twice their rate, on
8 prefill and 8 decode instances of eight A800 with a model of LLaMA2-70B's shape. The baseline
judges the prefill side when a request comes and the decode side when its prompt is computed; early
rejection judges both when it comes; prediction judges the decode side as it will be then. The text
at hand says neither the objectives nor the trace: 30 s and 100 ms here, on the conversation trace,
with the machines of `mooncake_policies`. Places and memory for decoding are plenty, so that only
objectives reject.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.papers.mooncake_policies import cluster_of
from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.config.schema import Config
from cluster.sim.readers import read_trace
from cluster.sim.report import Report, report
from cluster.sim.router import SimRouter
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import TraceRequest
from engine.latency import decode_work
from kvrelay.messages import Reserve
from router.admitting.policy import Admitted, Verdict
from router.candidate import Candidate
from router.demand import Demand
from router.events import Aborted, Command, Deliver, Refuse, Send
from router.forecast.forecast import Forecast
from router.refusal import Refusal
from router.request import Request

PAPER = {"baseline": 4183, "early_rejection": 3771, "predictive": 3589}
SOURCE = "arXiv 2407.00079, table 3"
PLACES, DECODE_BLOCKS = 1024, 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    prefill: int = 8
    decode: int = 8
    ttft_s: float = 30.0
    tpot_s: float = 0.1
    rate: float = 2.0

    def __str__(self) -> str:
        workers = f"{self.prefill} + {self.decode} workers, {self.rate:g}x"
        return f"{workers}, TTFT {self.ttft_s:g} s, TPOT {self.tpot_s * 1e3:g} ms"


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """Takes what gets its first token in time."""

    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        refusal, most_s = otherwise, demand.objectives.ttft_s
        for candidate in candidates:
            prediction = forecast.predict(demand, candidate, now_s)
            if most_s is None or prediction.ttft_s <= most_s:
                return Admitted(candidate=candidate, prediction=prediction)
            refusal = Refusal(reason="ttft_unreachable", message="the queues are too long")
        return refusal


class JudgedAgain(SimRouter):
    """Decode workers reject a computed prompt that would break a pace, and none before."""

    def _execute(self, command: Command) -> None:
        if isinstance(command, Send) and isinstance(command.message, Reserve):
            spec = replace(command.message.spec, tpot_s=None)
            command = replace(command, message=replace(command.message, spec=spec))
        if not isinstance(command, Deliver) or command.done or not self._rejects(command):
            super()._execute(command)
            return
        refusal = Refusal(reason="after_prefill", message="the decode worker is too busy by now")
        super()._execute(Refuse(request_id=command.request_id, refusal=refusal))
        self.hear(Aborted(request_id=command.request_id))

    def _rejects(self, command: Deliver) -> bool:
        request = self.core.requests[command.request_id]
        tpot_s = request.objectives.tpot_s
        if request.choices[0].next_index > 1 or request.placement is None or tpot_s is None:
            return False
        worker = self.core.workers[request.placement.decode]
        tokens = [_context(one) for one in self._beside(request)]
        work = decode_work(len(tokens) + 1, sum(tokens) + _context(request))
        return worker.step_s(work) > tpot_s

    def _beside(self, request: Request) -> Iterator[Request]:
        """Those that decode where it would."""
        assert request.placement is not None
        decode = request.placement.decode
        for one in self.core.requests.values():
            placed = one is not request and one.decodes and one.placement
            if placed and placed.decode == decode:
                yield one


def _context(request: Request) -> int:
    return request.spec.context_tokens + request.choices[0].next_index


class AsInThePaper(ClusterSimulation):
    """With the baseline, or early rejection."""

    def _router(self) -> SimRouter:
        made = super()._router()
        if self._config.router.admission.policy == "none":
            made.core.seeking.deciding = replace(made.core.deciding, admitting=PrefillSide())
        return JudgedAgain(made.core, self.clock, self._config.simulation.fabric.router_latency)


def simulated(policy: str, requests: Sequence[TraceRequest], setting: Setting) -> Report:
    cluster = _cluster(policy, setting)
    kind = ClusterSimulation if policy == "predictive" else AsInThePaper
    return report(kind(cluster, requests, Scale(rate=setting.rate)).run())


def _cluster(policy: str, setting: Setting) -> Config:
    cluster = cluster_of("kv_aware")
    simulation = cluster["simulation"]
    assert isinstance(simulation, dict)
    cluster["workers"] = [
        {"role": "prefill", "replicas": setting.prefill},
        {"role": "decode", "replicas": setting.decode},
    ]
    cluster["scheduler"] = {"prefill_chunk_tokens": 8192, "max_running_requests": PLACES}
    cluster["router"] = {
        "placement": {"policy": "kv_aware", "local_prefill": "off"},
        "admission": {"policy": "none" if policy == "baseline" else policy},
    }
    simulation["pools"] = [{}, {"blocks": DECODE_BLOCKS}]
    simulation["slo"] = {"ttft": f"{setting.ttft_s}s", "tpot": f"{setting.tpot_s}s"}
    return Config.model_validate(cluster, strict=False)


def claims(reports: Mapping[str, Report]) -> Iterator[Claim]:
    """How many are rejected, and against the baseline; and how many of all are served well."""
    first = _rejected(reports["baseline"])
    for policy, paper in PAPER.items():
        one = reports[policy]
        rejected = _rejected(one)
        yield _claim(f"{policy}: rejected", 100 * paper / 23_000, 100 * rejected / one.offered)
        if policy != "baseline" and first:
            in_paper = 100 * (paper / PAPER["baseline"] - 1)
            yield _claim(f"{policy}: against baseline", in_paper, 100 * (rejected / first - 1))
        yield _claim(f"{policy}: kept their objectives", None, 100 * one.attainment)


def _rejected(one: Report) -> int:
    return sum(one.refused.values())


def _claim(what: str, paper: float | None, ours: float) -> Claim:
    return Claim(what=what, unit="%", paper=paper, ours=ours, source=SOURCE, digits=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="conversation_trace.jsonl of kvcache-ai/Mooncake")
    parser.add_argument("--decode", type=int, default=8, help="decode workers, of 8 + so many")
    parser.add_argument("--ttft", type=float, default=30.0, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds")
    parser.add_argument("--rate", type=float, default=2.0, help="multiple of the trace's")
    parser.add_argument("--requests", type=int, help="only so many of the trace, for a quick look")
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    setting = Setting(decode=args.decode, ttft_s=args.ttft, tpot_s=args.tpot, rate=args.rate)
    requests = read_trace(args.trace, args.requests)
    found = list(claims({policy: simulated(policy, requests, setting) for policy in PAPER}))
    print_claims(f"Mooncake: rejections, {setting}", found)
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
