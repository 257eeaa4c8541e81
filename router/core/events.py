"""What the router's core hears and what it wants done. Pure values."""

from __future__ import annotations

from kvrelay.messages import BlockChanges, Counters, PoolUpdate, ToWorker, WorkerEvent, WorkerHello
from kvrelay.types import Incarnation, value
from router.core.state.generation import ChoiceTokens, GenerationRequest
from router.core.state.promises import Refusal
from router.core.state.quarantine import Pair


@value
class Submitted:
    request: GenerationRequest


@value
class ChoiceStopped:
    request_id: str
    choice: int
    valid_tokens: int


@value
class Aborted:
    request_id: str


@value
class DeadlinePassed:
    request_id: str


@value
class WorkerJoined:
    hello: WorkerHello


@value
class WorkerSuspected:
    """It has not reported for a while. Its next report ends the suspicion."""

    incarnation: Incarnation


@value
class WorkerLost:
    """`was_silent`: its process may still live, and write to its peers."""

    incarnation: Incarnation
    was_silent: bool = False


@value
class WorkerSaid:
    incarnation: Incarnation
    events: tuple[WorkerEvent, ...]
    counters: Counters
    blocks: tuple[BlockChanges, ...] = ()


@value
class TimePassed:
    """For those who wait: without any worker there are no reports."""


@value
class PoolNodeSaid:
    update: PoolUpdate


@value
class PoolNodeLost:
    """Its stream has ended."""

    node: Incarnation


Event = (
    Submitted
    | ChoiceStopped
    | Aborted
    | DeadlinePassed
    | WorkerJoined
    | WorkerSuspected
    | WorkerLost
    | WorkerSaid
    | TimePassed
    | PoolNodeSaid
    | PoolNodeLost
)


# --- commands ---------------------------------------------------------------------------------


@value
class Send:
    worker: Incarnation
    message: ToWorker


@value
class Admit:
    request_id: str


@value
class Refuse:
    """A `refusal` without `retry_after_s` is hopeless."""

    request_id: str
    refusal: Refusal


@value
class Deliver:
    request_id: str
    tokens: tuple[ChoiceTokens, ...]
    done: bool


@value
class Fail:
    request_id: str
    reason: str
    message: str


@value
class PairQuarantined:
    """A handoff failed: other pairs are preferred for so long."""

    pair: Pair
    seconds: float
    reason: str
    message: str


@value
class PairTrusted:
    """A handoff succeeded again."""

    pair: Pair


@value
class LadderStepped:
    """A tier's admission has become tighter, or less tight."""

    tier: str
    step: int
    cause: str


Command = Send | Admit | Refuse | Deliver | Fail | PairQuarantined | PairTrusted | LadderStepped


class Rejected(Exception):
    """An event of a worker can't be taken. `commands` came of those before it: they must be carried
    out, since the core has gone on as if they were."""

    def __init__(self, event: WorkerEvent, cause: Exception, commands: list[Command]) -> None:
        super().__init__(f"{type(event).__name__} of {event.key.request_id}: {cause!r}")
        self.commands = commands
