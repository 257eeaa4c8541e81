"""What the supervisor of a cluster hears and says, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


# --- events -------------------------------------------------------------------------------------


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
class Joined:
    """The router uses this worker; or `refused` says why it does not."""

    name: str
    life: int
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    name: str


@dataclass(frozen=True, slots=True)
class DriverSeen:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Serving | Lost | Joined | Stopped | DriverSeen | StopAsked | Tick


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    name: str
    life: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the router that this worker serves; answered by `Joined`."""

    name: str
    life: int
    address: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell the router that the worker at this address is gone."""

    address: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Remove the process, after a drain if it serves; answered by `Stopped`."""

    name: str
    drain: bool


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove what is left of a process that was lost."""

    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the people who watch."""

    text: str


Command = Start | Announce | Withdraw | Stop | Remove | Note
