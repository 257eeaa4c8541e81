"""The `router` section of a cluster file. Pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import combinations
from typing import Literal

from pydantic import Field, model_validator

from cluster.config.types import (
    AutoOrOff,
    AutoPort,
    AutoText,
    Bytes,
    Count,
    Port,
    Quantity,
    Section,
)

MOST_PORT = 65535
INTERNAL_ABOVE = 900
"""How far an internal port is above its public one, where none is given."""


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Of one router; 0: the system chooses. The fields are named as the keys of the file."""

    http_port: int
    grpc_port: int
    internal_http_port: int
    internal_grpc_port: int


PORT_KINDS = {
    "http_port": "HTTP",
    "grpc_port": "gRPC",
    "internal_http_port": "internal HTTP",
    "internal_grpc_port": "internal gRPC",
}
"""# key of a port |-> what listens there"""


class PlacementSection(Section):
    """Which workers serve a request."""

    policy: Literal["kv_aware", "local_cache", "least_loaded", "round_robin", "random"] = "kv_aware"
    """kv_aware: prefill worker, decode worker and prefix source together, by predicted completion;
    local_cache: the prefill worker that is done first with what it has cached itself; least_loaded:
    the shortest queue and the emptiest batch; round_robin: in turn; random."""
    local_prefill: AutoOrOff = "off"
    """auto: with kv_aware, a decode worker computes a prompt itself where that is predicted to be
    done sooner, and all who decode there keep their objectives; off: prefill workers do."""
    move_hot_spots: bool = False
    """Long requests leave a decode worker before its memory or its time for a step runs out, while
    another one has room."""


class AdmissionSection(Section):
    """Which requests are taken."""

    policy: Literal["predictive", "early_rejection", "queue_limit", "none"] = "predictive"
    """predictive: those that will keep their objectives at the time they get to each worker;
    early_rejection: by the load when they arrive; queue_limit: while no prefill queue is full;
    none: all, and they wait."""
    queue_limit: Count = 64
    """Prompts that wait at a prefill worker, with queue_limit."""


class RouterSection(Section):
    replicas: Count = 1
    """Router processes, each with its own faces and metrics; they share the workers."""
    host: str = "127.0.0.1"
    """The address that clients connect to; 0.0.0.0 for every interface."""
    http_port: Port = 8000
    """Of the first router, the next one's is the next; 0: the system chooses each."""
    grpc_port: Port = 50051
    """As http_port."""
    internal_host: AutoText = None
    """Where workers join, operators ask and Prometheus reads: no clients. auto: loopback, but on a
    Ray of several nodes the node's own address; node: the node's own address; else an address."""
    internal_http_port: AutoPort = None
    """For /metrics and /debug/kv. auto: 900 above http_port, so 8900; the system chooses where
    http_port is 0 or leaves no room."""
    internal_grpc_port: AutoPort = None
    """For kvrelay worker --join and kvrelay status. auto: 900 above grpc_port, so 50951."""
    public_metrics: bool = False
    """true: /metrics is on the public HTTP port too."""
    same_ports: bool = False
    """All routers have these ports: where each is on a host of its own, such as a pod."""
    max_body: Bytes = 4 * 2**20
    """The largest HTTP body or gRPC message that is read."""
    record: str | None = None
    """A file for all that the router hears and decides, prompts included: a trace for `kvrelay
    simulate`, and a log to replay; null: nothing is recorded. Of several routers each has its own,
    with its number before the suffix."""
    record_size: Bytes = 2**30
    """The most that is recorded in one."""
    placement: PlacementSection = PlacementSection()
    dispatch: Literal["direct", "shared_queue"] = "direct"
    """direct: a prompt goes to its prefill worker as soon as it is admitted, and waits there;
    shared_queue: it waits at the router, for the next prefill worker that is about to be free; for
one router only."""
    admission: AdmissionSection = AdmissionSection()
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """What Ray sets aside for each router."""

    def ports(self, number: int) -> RouterPorts:
        """Of one router."""
        firsts = (
            self.http_port,
            self.grpc_port,
            self._internal(self.internal_http_port, self.http_port),
            self._internal(self.internal_grpc_port, self.grpc_port),
        )
        step = 0 if self.same_ports else number
        return RouterPorts(*(first and first + step for first in firsts))

    def _internal(self, given: int | None, public: int) -> int:
        """The first router's."""
        if given is not None:
            return given
        above = public + INTERNAL_ABOVE
        return above if public and above + self.replicas - 1 <= MOST_PORT else 0

    @model_validator(mode="after")
    def _one_queue(self) -> RouterSection:
        if self.replicas > 1 and self.dispatch == "shared_queue":
            raise ValueError(
                "one router with dispatch: shared_queue: each would have a queue of its own, which "
                "the others know nothing of"
            )
        return self

    @model_validator(mode="after")
    def _ports_apart(self) -> RouterSection:
        taken = self._taken()
        for (one, its), (other, others) in combinations(taken.items(), 2):
            if common := its & others:
                where = f"{self._range(one)}, {self._range(other)}"
                raise ValueError(
                    f"different ports for {one} and {other}: {where} share {min(common)}"
                )
        for key, ports in taken.items():
            if max(ports, default=0) > MOST_PORT:
                raise ValueError(f"ports up to {MOST_PORT}: {self._range(key)} is beyond")
        return self

    def _taken(self) -> dict[str, set[int]]:
        """# key of a port |-> those that are fixed, of all routers"""
        each = zip(*(astuple(self.ports(n)) for n in range(self.replicas)), strict=True)
        return {key: {*ports} - {0} for key, ports in zip(PORT_KINDS, each, strict=True)}

    def _range(self, key: str) -> str:
        """In words."""
        ports = sorted(self._taken()[key]) or [0]
        to = f" to {ports[-1]}" if len(ports) > 1 else ""
        return f"{PORT_KINDS[key]} on {ports[0]}{to}"
