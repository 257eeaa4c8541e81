"""The `router` section of a cluster file. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cluster.config_types import AutoOrOff, Count, Port, Quantity, Section
from cluster.quantities import Bytes


class Placement(Section):
    """Which workers serve a request."""

    policy: Literal["kv_aware", "local_cache", "least_loaded", "round_robin", "random"] = "kv_aware"
    """kv_aware: prefill worker, decode worker and prefix source together, by predicted completion;
    local_cache: the prefill worker that is done first with what it has cached itself; least_loaded:
    the shortest queue and the emptiest batch; round_robin: in turn; random."""
    local_prefill: AutoOrOff = "auto"
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
    replicas: int = 1
    """Only 1 works so far."""
    host: str = "127.0.0.1"
    """The address that clients connect to; 0.0.0.0 for every interface."""
    http_port: Port = 8000
    """0: the system chooses."""
    grpc_port: Port = 50051
    """0: the system chooses."""
    max_body: Bytes = 4 * 2**20
    """The largest HTTP body or gRPC message that is read."""
    record: str | None = None
    """A file for all that the router hears and decides, prompts included: a trace for `kvrelay
    simulate`, and a log to replay; none: nothing is recorded."""
    record_size: Bytes = 2**30
    """The most that is recorded."""
    placement: Placement = Placement()
    dispatch: Literal["direct", "shared_queue"] = "direct"
    """direct: a prompt goes to its prefill worker as soon as it is admitted, and waits there;
    shared_queue: it waits at the router, for the next prefill worker that is about to be free."""
    admission: Admission = Admission()
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """What Ray sets aside for the router."""

    @field_validator("replicas")
    @classmethod
    def _only_one(cls, given: int) -> int:
        if given != 1:
            raise ValueError("1: several routers aren't supported yet")
        return given

    @model_validator(mode="after")
    def _two_ports(self) -> Router:
        if self.http_port == self.grpc_port != 0:
            raise ValueError("two different ports for http_port and grpc_port")
        return self
