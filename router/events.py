"""What the router's core hears and what it wants done. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.messages import BlockChanges, Counters, ToWorker, WorkerEvent, WorkerHello
from kvrelay.types import Incarnation
from router.generation import ChoiceTokens, GenerationRequest
from router.placement import Pair
from router.refusal import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    request: GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStopped:
    request_id: str
    choice: int
    valid_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    hello: WorkerHello


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    incarnation: Incarnation
    events: tuple[WorkerEvent, ...]
    counters: Counters
    blocks: tuple[BlockChanges, ...] = ()


Event = (
    Submitted | ChoiceStopped | Aborted | DeadlinePassed | WorkerJoined | WorkerLost | WorkerSaid
)


# --- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    worker: Incarnation
    message: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """A `refusal` without `retry_after_s` is hopeless."""

    request_id: str
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    request_id: str
    tokens: tuple[ChoiceTokens, ...]
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    request_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairQuarantined:
    """A handoff failed: other pairs are preferred for so long."""

    pair: Pair
    seconds: float
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTrusted:
    """A handoff succeeded again."""

    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderStepped:
    """A tier's admission has become tighter, or less tight."""

    tier: str
    step: int
    cause: str


Command = Send | Admit | Refuse | Deliver | Fail | PairQuarantined | PairTrusted | LadderStepped
