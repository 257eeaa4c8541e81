"""A whole cluster as a seed has it: several routers, tiers, moves, prefixes from peers and pools,
with or without a controller, and every fault at any moment.

Whatever happens, no admitted request fails while there is capacity; each stream has its right
tokens, each once; and nothing is left held.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from cluster.core.desired import process_name
from kvpool.core.blocks.eviction import policies as evictions
from kvpool.core.transfer.messages import HandoffMode
from kvrelay.qos import ONE_TIER
from kvrelay.types import NO_OBJECTIVES, Objectives, Role
from router.core.faults.silence import PERIOD_S
from router.core.policy.choice import Policies
from tests.sim.clients import Clients
from tests.sim.controller import Controller
from tests.sim.faults import Faults
from tests.sim.model import GEMMA, HISTORIES, PLAIN, TIERS
from tests.sim.pool_node import Host
from tests.sim.talks import LONGEST, make_talks
from tests.sim.waits import who_waits
from tests.sim.worker import Shape

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
ROLES = ((P, D), (P, P, D, D), (P, D, D), (P, D, B), (B, B))
OBJECTIVES = (
    NO_OBJECTIVES,
    NO_OBJECTIVES,
    Objectives(ttft_s=2.0, tpot_s=0.05),
    Objectives(ttft_s=5.0, tpot_s=0.2),
)
LONGEST_ANSWER = 24
NOTICED_S = 20.0
"""After so long nobody is connected to one who isn't there any more."""
MOST_S = 600.0
"""A cluster that is whole again serves everybody long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one world. `happened`: # fault, or what it led to |-> how often"""

    events: int
    ends: Counter[str]
    happened: Counter[str]


class Fleet:
    def __init__(self, seed: int, *, requests: int = 40, strikes: int = 10) -> None:
        self.rng = rng = Random(f"fleet {seed}")
        self.seed, self.strikes = seed, strikes
        self.mode = rng.choice([HandoffMode.PUSH, HandoffMode.PULL, HandoffMode.POOL])
        has_pool = self.mode is HandoffMode.POOL or rng.random() < 0.4
        self.hosts = [self._host(i) for i in range(rng.choice([1, 2]) if has_pool else 0)]
        policies = Policies(
            move_hot_spots=rng.random() < 0.7,
            local_prefill=rng.random() < 0.4,
            placement=rng.choice(["kv_aware", "kv_aware", "kv_aware", "random", "least_loaded"]),
        )
        has_controller = rng.random() < 0.5
        self._qos = TIERS if rng.random() < 0.6 else ONE_TIER
        names = [f"router-{i}" for i in range(rng.choice([2, 3]))]
        self.clients = Clients(
            seed,
            0,
            self.mode,
            policies,
            routers=names,
            starts=not has_controller,
            tick_s=PERIOD_S,
        )
        self.cluster = self.clients.cluster
        layout = rng.choice([PLAIN, PLAIN, GEMMA])
        counts: Counter[Role] = Counter()
        shapes = {}
        for i, role in enumerate(rng.choice(ROLES)):
            shapes[process_name(role, counts[role])] = self._shape(role, i, layout)
            counts[role] += 1
        self.cluster.pools.hosts |= {host.name: host for host in self.hosts}
        self.controller = (
            Controller(self.cluster, names, shapes, self.hosts) if has_controller else None
        )
        if self.controller is None:
            self._start(shapes)
        self.cluster.controller = self.controller
        self.faults = Faults(self.clients, self.controller, rng)
        self._requests = requests

    def _host(self, number: int) -> Host:
        return Host(
            name=f"h{number}",
            places=self.rng.choice((4, 16, 40)),
            disk_slots=self.rng.choice((0, 6, 40)),
            policy=self.rng.choice(evictions()),
        )

    def _shape(self, role: Role, number: int, layout: object) -> Shape:
        rng = self.rng
        return Shape(
            role=role,
            blocks=rng.choice((24, 40, 60)),
            slabs=rng.choice((1, 2, 4)),
            layout=layout,  # type: ignore[arg-type]
            mode=self.mode,
            max_model_len=LONGEST + LONGEST_ANSWER,
            host=self.hosts[number % len(self.hosts)].name if self.hosts else "",
            launches_ahead=rng.random() < 0.6,
            prompt_steps=1 + (Random(f"chunks {self.seed} {number}").random() < 0.5),
            qos=self._qos,
        )

    def _start(self, shapes: dict[str, Shape]) -> None:
        for host in self.hosts:
            self.cluster.pools.start_node(host)
        for name, shape in shapes.items():
            self.cluster.start_worker(name, shape)

    # --- a run ----------------------------------------------------------------------------------

    def run(self) -> Result:
        cluster, clients = self.cluster, self.clients
        assert cluster.wait(self._is_whole, MOST_S), "the cluster never started"
        self._ask()
        for i in range(self.strikes):
            cluster.after(f"strike {i}", self.faults.strike, self.rng.uniform(0.2, 6.0))
        assert cluster.wait(lambda: clients.all_ended, MOST_S), who_waits(cluster)
        for rest_s in (NOTICED_S, 0.0):
            assert cluster.wait(self._is_whole, MOST_S), "a process never came back"
            cluster.wait(lambda: False, rest_s)
        cluster.run()
        ends = clients.conclude()
        lost = {end: n for end, n in ends.items() if end.startswith("failed")}
        assert not lost, f"requests failed while there was capacity: {lost}"
        return Result(events=cluster.events_done, ends=ends, happened=self.happened())

    def _ask(self) -> None:
        share = self.rng.choice([0.0, 0.5])
        for spec in make_talks(self.rng, self._requests, LONGEST_ANSWER, stop_share=0.5):
            objectives = self.rng.choice(OBJECTIVES) if self.rng.random() < share else NO_OBJECTIVES
            tier = self.rng.choice(TIERS.tiers).name if self._qos is TIERS else ""
            self.clients.add(replace(spec, qos_tier=tier), 5.0, objectives)

    def _is_whole(self) -> bool:
        """Every process runs, and every router knows every worker."""
        cluster = self.cluster
        if self.controller is not None and not self.controller.is_whole():
            return False
        lives = [*cluster.routers.values()]
        return (
            len(lives) == len(self.clients.addresses)
            and not any(cluster.is_stopped(one) for one in cluster.alive)
            and all(router.core.state.workers.keys() == cluster.workers.keys() for router in lives)
            and all(host.node is not None for host in self.hosts)
        )

    def happened(self) -> Counter[str]:
        """Without what dead processes have counted."""
        found = self.faults.counts + self.cluster.counts
        if self.controller is not None:
            found += self.controller.counts
        found["streams that went on at a router"] = sum(
            call.resumed for call in self.clients.calls.values()
        )
        found["refusals"] = sum(call.refusals for call in self.clients.calls.values())
        for router in self.cluster.routers.values():
            found += router.counts
            state = router.core.state
            found["moves"] += sum(state.moves.moved.values())
            found["local prefills"] += state.local_prefills
            found["promises kept"] += state.promises.kept
        for worker in self.cluster.workers.values():
            lookup = worker.core.lookup
            found["steps launched ahead"] += worker.device.overlapped_steps
            found["chunks launched ahead"] += worker.device.prompts_ahead
            found["preemptions"] += worker.decode.batch.running_set.preemptions
            found["copies that stalled"] += worker.mover.hung
            if lookup.peers is not None:
                found["tokens pulled from peers"] += lookup.peers.tokens
            if lookup.pool is not None:
                found["tokens from a host's memory"] += lookup.pool.own.host_tokens
                found["tokens from a disk"] += lookup.pool.own.disk_tokens
        return +found


def run(seed: int) -> Result:
    """Independent of all that was run before."""
    HISTORIES.forget()
    return Fleet(seed).run()
