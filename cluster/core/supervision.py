"""What the supervisor of a cluster hears and says, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.core.activity import StartActivity


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    BACKING_OFF = "backing off"
    STOPPING = "stopping"
    GONE = "gone"


class ProcessKind(StrEnum):
    ROUTER = "router"
    WORKER = "worker"
    POOL_NODE = "pool node"


@dataclass(frozen=True, slots=True)
class Home:
    """Where a process runs. Those with the same `host` can share memory; `node` is Ray's."""

    host: str
    node: str


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Ray has found a place for a worker that starts."""

    name: str
    life: int
    home: Home


@dataclass(frozen=True, slots=True, kw_only=True)
class Does:
    """A process that starts says what it does now."""

    name: str
    life: int
    activity: StartActivity


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A process has started; `address` is what others reach it by."""

    name: str
    life: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A process failed to start, crashed, or closed. `fatal`: trying again can't help."""

    name: str
    life: int
    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessJoined:
    """A router knows this worker or pool node; or `refused` says why it uses it not."""

    name: str
    life: int
    router: str
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswered:
    """To a `Ping`: the process does not hang."""

    name: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStopped:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What the processes of a former controller say: whether the cluster was READY under it."""

    was_ready: bool


@dataclass(frozen=True, slots=True)
class DriverSeen:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    pass


@dataclass(frozen=True, slots=True)
class SupervisionTick:
    pass


Event = (
    Placed
    | Does
    | Serving
    | Lost
    | ProcessJoined
    | ProcessAnswered
    | ProcessStopped
    | Recalled
    | DriverSeen
    | StopAsked
    | SupervisionTick
)


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """`node`: only there."""

    name: str
    life: int
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a router that this worker or pool node serves; answered by `Joined`."""

    router: str
    name: str
    life: int
    address: str
    kind: ProcessKind = ProcessKind.WORKER


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell a router that the worker or pool node at this address is gone."""

    router: str
    address: str
    kind: ProcessKind = ProcessKind.WORKER


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Remove the process, after a drain if it serves; answered by `Stopped`."""

    name: str
    drain: bool


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove what is left of a process that was lost."""

    name: str


@dataclass(frozen=True, slots=True)
class PingProcess:
    """Ask a process that serves for a sign of life; answered by `Answered`."""

    name: str
    life: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Tell a process that the cluster is READY. A restarted controller asks the process for it."""

    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the people who watch."""

    text: str


Command = Start | Announce | Withdraw | StopProcess | Remove | PingProcess | Remember | Note
