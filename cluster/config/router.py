"""The `router` section of a cluster file. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cluster.config.types import AutoOrOff, Count, Port, Quantity, Section
from cluster.quantities import Bytes

MOST_PORT = 65535


class Placement(Section):
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


class Admission(Section):
    """Which requests are taken."""

    policy: Literal["predictive", "early_rejection", "queue_limit", "none"] = "predictive"
    """predictive: those that will keep their objectives at the time they get to each worker;
    early_rejection: by the load when they arrive; queue_limit: while no prefill queue is full;
    none: all, and they wait."""
    queue_limit: Count = 64
    """Prompts that wait at a prefill worker, with queue_limit."""


class Router(Section):
    replicas: Count = 1
    """Router processes, each with its own faces and metrics; they share the workers."""
    host: str = "127.0.0.1"
    """The address that clients connect to; 0.0.0.0 for every interface."""
    http_port: Port = 8000
    """Of the first router, the next one's is the next; 0: the system chooses each."""
    grpc_port: Port = 50051
    """As http_port."""
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
    placement: Placement = Placement()
    dispatch: Literal["direct", "shared_queue"] = "direct"
    """direct: a prompt goes to its prefill worker as soon as it is admitted, and waits there;
    shared_queue: it waits at the router, for the next prefill worker that is about to be free; for
one router only."""
    admission: Admission = Admission()
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """What Ray sets aside for each router."""

    def ports(self, number: int) -> tuple[int, int]:
        """HTTP and gRPC of one router; 0: the system chooses."""
        step = 0 if self.same_ports else number
        http, grpc = (first and first + step for first in (self.http_port, self.grpc_port))
        return http, grpc

    @model_validator(mode="after")
    def _one_queue(self) -> Router:
        if self.replicas > 1 and self.dispatch == "shared_queue":
            raise ValueError(
                "one router with dispatch: shared_queue: each would have a queue of its own, which "
                "the others know nothing of"
            )
        return self

    @model_validator(mode="after")
    def _ports_apart(self) -> Router:
        http, grpc = ({*ports} - {0} for ports in zip(*self._all_ports(), strict=True))
        if common := http & grpc:
            raise ValueError(
                f"different ports for http_port and grpc_port: {self._ranges()} share {min(common)}"
            )
        if max(http | grpc, default=0) > MOST_PORT:
            raise ValueError(f"ports up to {MOST_PORT}: {self._ranges()} are beyond")
        return self

    def _all_ports(self) -> list[tuple[int, int]]:
        return [self.ports(number) for number in range(self.replicas)]

    def _ranges(self) -> str:
        """In words."""
        (http, grpc), (last_http, last_grpc) = self.ports(0), self.ports(self.replicas - 1)
        if self.replicas == 1 or self.same_ports:
            return f"HTTP on {http}, gRPC on {grpc}"
        return f"HTTP on {http} to {last_http}, gRPC on {grpc} to {last_grpc}"
