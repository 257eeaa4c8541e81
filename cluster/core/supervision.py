"""Events and commands of a cluster's supervisor, as values. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.config.workers import role_at
from engine.core.activity import StartActivity
from kvrelay.types import Role


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    BACKING_OFF = "backing off"
    LEFT_OUT = "left out"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"


class ProcessKind(StrEnum):
    ROUTER = "router"
    WORKER = "worker"
    POOL_NODE = "pool node"


Roles = Counter[Role | None]
"""# role |-> so many processes of a pool; those of routers have none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPool:
    """Processes with the same settings, for which `revision` stands. `needs`: the resources that
    each asks of Ray, in words. `role`: that of its workers; None: they take either role.
    `lame_duck_s`: for which a router that leaves still takes requests."""

    kind: ProcessKind
    count: int
    revision: str = ""
    needs: str = "{}"
    role: Role | None = None
    lame_duck_s: float = 0.0

    def role_of(self, number: int) -> Role | None:
        """The role with which this process of the pool begins; None: a router."""
        return role_at(self.role, number) if self.kind is ProcessKind.WORKER else None

    def roles(self) -> Roles:
        """Of all, as they begin."""
        return Counter(self.role_of(number) for number in range(self.count))


@dataclass(frozen=True, slots=True)
class Home:
    """Where a process runs. Processes with the same `host` can share memory; `node` is Ray's."""

    host: str
    node: str


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Ray has found a node for a router or worker that starts."""

    name: str
    life: int
    home: Home


@dataclass(frozen=True, slots=True, kw_only=True)
class Does:
    """A starting process reports its activity."""

    name: str
    life: int
    activity: StartActivity


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A process has started; others reach it at `address`."""

    name: str
    life: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A process failed to start, crashed, or closed. `fatal`: another start can't help."""

    name: str
    life: int
    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessJoined:
    """A router knows this worker or pool node; or `refused` says why it doesn't use it."""

    name: str
    life: int
    router: str
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswered:
    """The answer to a `Ping`: the process does not hang."""

    name: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStopped:
    name: str


@dataclass(frozen=True, slots=True)
class DesiredChanged:
    """From now on these are the pools of the cluster. `anew`: a file says so, and workers that were
    flipped by hand get their pool's role back. `pool_revision`: of the pool nodes; None: as it
    was."""

    desired: Mapping[str, DesiredPool]
    anew: bool = False
    pool_revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """This process shall leave; another one replaces it, unless its pool shall have one fewer."""

    name: str
    replace: bool = True


@dataclass(frozen=True, slots=True)
class RoleAsked:
    """This worker shall have this role, and whoever comes in its place."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class RoleTaken:
    """The worker has this role, and routers hear so."""

    name: str
    life: int
    role: Role


@dataclass(frozen=True, slots=True)
class RoleRefused:
    """The worker can't have this role beside the others."""

    name: str
    life: int
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class NodesDrain:
    """Ray is about to end these nodes: others replace those on them. # node |-> seconds left"""

    nodes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DriverEnded:
    """The serve command has ended without a word. One that is only silent has not."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    pass


@dataclass(frozen=True, slots=True)
class SupervisionTick:
    pass


SupervisorEvent = (
    Placed
    | Does
    | Serving
    | Lost
    | ProcessJoined
    | ProcessAnswered
    | ProcessStopped
    | DesiredChanged
    | DrainAsked
    | RoleAsked
    | RoleTaken
    | RoleRefused
    | NodesDrain
    | DriverEnded
    | StopAsked
    | SupervisionTick
)


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """`node`: start it only there. `role`: that of a worker."""

    name: str
    life: int
    node: str | None = None
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class SetRole:
    """Give a worker that serves another role; the answer is `RoleTaken` or `RoleRefused`."""

    name: str
    life: int
    role: Role


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a router that this worker or pool node serves; the answer is `Joined`."""

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
    """Remove the process, after a drain if it serves; the answer is `Stopped`. `lame_duck`: a
    router first leads load balancers to others."""

    name: str
    drain: bool
    lame_duck: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """Clean up after a process that was lost."""

    name: str


@dataclass(frozen=True, slots=True)
class PingProcess:
    """Ask a serving process for a heartbeat; the answer is `Answered`."""

    name: str
    life: int


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the people who watch the start."""

    text: str


SupervisorCommand = (
    Start | SetRole | Announce | Withdraw | StopProcess | Remove | PingProcess | Note
)
