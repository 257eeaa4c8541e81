"""What a live router's record tells: each request's prediction beside what it took, and how many
tokens it got.

The recorded events make a core of the same beginning decide the same, so its predictions need not
have been recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation
from router.core.core import RouterCore
from router.core.events import Deliver, Submitted, WorkerJoined, WorkerSaid
from router.core.record import Entry, from_line
from router.core.request import Request
from router.core.start import Beginning, begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds of an admitted request; the actual ones are None where it never got so far. The
    `at_most` ones are what it was admitted by."""

    at_s: float
    ttft_s: float
    ttft_at_most_s: float
    tpot_s: float
    tpot_at_most_s: float
    actual_ttft_s: float | None
    actual_tpot_s: float | None
    phases_s: dict[str, float]


@dataclass(slots=True)
class Told:
    """`submitted_s` of all requests, refused ones included, on the router's clock, and how many
    `tokens` each got. `reported_s`: when workers' reports came."""

    submitted_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reported_s: list[float] = field(default_factory=list)
    hellos: dict[Incarnation, WorkerHello] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)  # request |-> its place in these
    _placed: dict[int, tuple[float, Request]] = field(default_factory=dict)

    def hear(self, core: RouterCore, entry: Entry) -> None:
        event = entry.event
        core.handle(event, entry.at_s)
        if isinstance(event, WorkerJoined):
            self.hellos[event.hello.incarnation] = event.hello
        elif isinstance(event, WorkerSaid):
            self.reported_s.append(entry.at_s)
        elif isinstance(event, Submitted):
            self._submitted(core, event, entry.at_s)
        for command in entry.commands:
            if isinstance(command, Deliver):
                new = sum(len(one.token_ids) for one in command.tokens)
                self.tokens[self._numbers[command.request_id]] += new

    def _submitted(self, core: RouterCore, event: Submitted, at_s: float) -> None:
        name = event.request.request_id
        self._numbers[name] = len(self.submitted_s)
        self.submitted_s.append(at_s)
        self.tokens.append(0)
        request = core.state.requests.get(name)
        if request is not None:
            self._placed[len(self.submitted_s)] = at_s, request

    def predictions(self) -> list[Predicted]:
        found = (_predicted(at_s, request) for at_s, request in self._placed.values())
        return [one for one in found if one is not None]


def read_record(path: Path) -> Told:
    with path.open(encoding="ascii") as lines:
        return _told(from_line(line) for line in lines)


def _told(values: Iterable[Beginning | Entry]) -> Told:
    told, core = Told(), RouterCore()
    for value in values:
        if isinstance(value, Beginning):
            core = begin(value)
        else:
            told.hear(core, value)
    return told


def _predicted(at_s: float, request: Request) -> Predicted | None:
    """None: it was never placed, or had to be run again."""
    prediction, ledger = request.predicted, request.ledger
    if prediction is None or request.tries > 1:
        return None
    first_s = ledger.after_s("first_token_received")
    return Predicted(
        at_s=at_s,
        ttft_s=prediction.ttft_s,
        ttft_at_most_s=prediction.ttft_at_most_s,
        tpot_s=prediction.tpot_s,
        tpot_at_most_s=prediction.tpot_at_most_s,
        actual_ttft_s=None if first_s is None else ledger.before_submission_s + first_s,
        actual_tpot_s=request.tpot_s(),
        phases_s=ledger.phases(),
    )
