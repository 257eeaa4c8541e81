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
    KeyHash,
    Port,
    Quantity,
    Seconds,
    Section,
)

MOST_PORT = 65535
INTERNAL_ABOVE = 900
"""An internal port without a value is this far above its public one."""


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """The ports of one router; 0: the system chooses. Fields are named as the keys of the file."""

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
"""# key of a port |-> its protocol, in words"""


class PlacementSection(Section):
    """Which workers serve a request."""

    policy: Literal["kv_aware", "local_cache", "least_loaded", "round_robin", "random"] = "kv_aware"
    """kv_aware: prefill worker, decode worker and prefix source are chosen together, by predicted
    completion; local_cache: the prefill worker that would be done first with its own cache;
    least_loaded: the shortest queue and the emptiest batch; round_robin: in turn; random."""
    local_prefill: AutoOrOff = "off"
    """auto: with kv_aware, a decode worker computes a prompt itself if that is predicted to be
    faster and every request that decodes there keeps its objectives; off: only prefill workers
    compute prompts."""
    move_hot_spots: bool = False
    """true: long requests move away from a decode worker before its memory or step time runs out,
    if another worker has room."""


class AdmissionSection(Section):
    """Which requests are admitted."""

    policy: Literal["predictive", "early_rejection", "queue_limit", "none"] = "predictive"
    """predictive: requests that are predicted to keep their objectives, with the load at the time
    they reach each worker; early_rejection: by the load when they arrive; queue_limit: while no
    prefill queue is full; none: all requests, however long they wait."""
    queue_limit: Count = 64
    """With queue_limit: at most this many prompts wait at a prefill worker."""


class ConversationsSection(Section):
    """Answers of /v1/responses that a client can go on with by their ids (previous_response_id).
    Each router keeps its own, in memory."""

    answers: Count = 10_000
    """At most this many are kept."""
    memory: Bytes = 256 * 2**20
    """Memory for their text. The tenant with most of it loses its oldest answer first."""
    age: Seconds = 3600.0
    """How long an answer is kept."""


class RouterSection(Section):
    replicas: Count = 1
    """Router processes, each with its own APIs and metrics; they share the workers."""
    host: str = "127.0.0.1"
    """The address that clients connect to; 0.0.0.0 for every interface."""
    http_port: Port = 8000
    """Port of the first router; the second has the next port, and so on. 0: the system chooses."""
    grpc_port: Port = 50051
    """Counts up like http_port."""
    internal_host: AutoText = None
    """Address for workers, operators and Prometheus, not for clients. auto: loopback, but on a Ray
    of several nodes the node's own address; node: the node's own address; else an address."""
    internal_http_port: AutoPort = None
    """For /metrics and /debug/kv. auto: 900 above http_port, so 8900. The system chooses if
    http_port is 0 or too high for that."""
    internal_grpc_port: AutoPort = None
    """For kvrelay worker --join and kvrelay status. auto: 900 above grpc_port, so 50951."""
    public_metrics: bool = False
    """true: /metrics is on the public HTTP port too."""
    open_metrics: bool = False
    """true: the internal /metrics needs no token, for a Prometheus without credentials."""
    same_ports: bool = False
    """true: all routers have the same ports, because each has a host of its own, such as a pod."""
    api_keys: str | None = None
    """A file of API keys, made by `kvrelay keys add`: only calls with one of them are served. Each
    router reads it at this path, and again when it changes. null: no file."""
    api_key_hashes: tuple[KeyHash, ...] = ()
    """SHA-256 of further API keys, in hex, as `kvrelay serve --api-key KEY` sets them. They belong
    to the tenant `default` and have no limits."""
    max_body: Bytes = 4 * 2**20
    """The largest HTTP body or gRPC message that is accepted."""
    record: str | None = None
    """A file in which the router records every event and decision, prompts included. It is a trace
    for `kvrelay simulate`, and it can be replayed. Of several routers each has its own file, with
    its number before the suffix. null: no record."""
    record_size: Bytes = 2**30
    """The largest size of one such file."""
    directory_memory: Bytes = 512 * 2**20
    """Memory of each router for its directory: which worker and pool node has which prefix. When it
    is full, prefixes that were stored and asked for longest ago are forgotten. 512 MiB are about
    12 million blocks."""
    failover_patience: Seconds = 600.0
    """How long a request that was admitted and has lost its worker waits for another one, if it has
    no deadline. It goes before new requests of its tier."""
    lame_duck: Seconds | None = 5.0
    """How long `kvrelay router` still takes requests after SIGTERM, while `/ready` is 503 and its
    gRPC health NOT_SERVING, so that load balancers leave it. It should be longer than they take
    between two checks. Ctrl-C leaves it out; null: none."""
    placement: PlacementSection = PlacementSection()
    dispatch: Literal["direct", "shared_queue"] = "direct"
    """direct: a prompt goes to its prefill worker as soon as it is admitted, and waits there;
    shared_queue: it waits at the router for the next prefill worker that is about to be free. For
    one router only."""
    admission: AdmissionSection = AdmissionSection()
    conversations: ConversationsSection = ConversationsSection()
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """Resources that Ray reserves for each router."""

    def ports(self, number: int) -> RouterPorts:
        """The ports of the router with this number."""
        firsts = (
            self.http_port,
            self.grpc_port,
            self._internal(self.internal_http_port, self.http_port),
            self._internal(self.internal_grpc_port, self.grpc_port),
        )
        step = 0 if self.same_ports else number
        return RouterPorts(*(first and first + step for first in firsts))

    def _internal(self, given: int | None, public: int) -> int:
        """The internal port of the first router."""
        if given is not None:
            return given
        above = public + INTERNAL_ABOVE
        return above if public and above + self.replicas - 1 <= MOST_PORT else 0

    @model_validator(mode="after")
    def _one_queue(self) -> RouterSection:
        if self.replicas > 1 and self.dispatch == "shared_queue":
            raise ValueError(
                "one router with dispatch: shared_queue: each router would have its own queue, and "
                "they don't know each other's"
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
                raise ValueError(f"ports up to {MOST_PORT}: {self._range(key)} is too high")
        return self

    def _taken(self) -> dict[str, set[int]]:
        """# key of a port |-> the fixed ports of all routers"""
        each = zip(*(astuple(self.ports(n)) for n in range(self.replicas)), strict=True)
        return {key: {*ports} - {0} for key, ports in zip(PORT_KINDS, each, strict=True)}

    def _range(self, key: str) -> str:
        """The ports of all routers, in words."""
        ports = sorted(self._taken()[key]) or [0]
        to = f" to {ports[-1]}" if len(ports) > 1 else ""
        return f"{PORT_KINDS[key]} on {ports[0]}{to}"
