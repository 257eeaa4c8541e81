"""Which requests may have killed a worker, and which of them runs alone. Pure.

When a worker has died, its witness tells which requests were in its last step and how it ended.
Those in the step of a suspicious end (an exception, a hung step, a fatal signal) are suspects. So
are those that were in the steps of two workers that were killed without a word. Suspects run again
one at a time, and no other request is in their steps.

    HELD --its turn--> TRIED --a few tokens, or its end--> trusted again
      ^                  |----its worker dies in a step that it had for itself--> convicted
      '-- its worker dies in a step with others

    HELD, TRIED --another suspect of the same death is convicted--> CLEARED --budget--> RETURNING
    RETURNING --a few tokens, or its end--> trusted again

A suspect that was killed without a word for the first time is tried again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.types import Incarnation, RequestKey, value

PEER_END_S = 0.1
"""Whose peer lost the connection to a worker waits so long to hear that this one is gone."""
END_TOLD_S = 1.5
"""Requests of a dead worker wait at most this long until it is known how the worker ended. Usually
that takes milliseconds."""
ALONE_TOKENS = 8
"""A suspect that has yielded so many tokens since its last death is trusted again. More than a
worker computes before the router hears of them."""
TURN_S = 2.0
"""A suspect for which no worker has room holds up the next one for so long."""
RETRY_SHARE = 0.2
LEAST_RETRIES = 4
"""Requests that were cleared go back to the workers a few at a time: they may fill this share of
the active requests, and LEAST_RETRIES in any case, until they have yielded tokens."""
LEFT_S = 5.0
"""A request that failed so shortly before its worker died may have been in its last step."""


class Blame(StrEnum):
    """Whom the end of a worker speaks against."""

    NONE = "none"  # nobody: it lives, it was asked to end, or nothing is known
    SHARED = "shared"  # those that were in the step of another killed worker too
    STEP = "step"  # all in its last step


@value
class Ending:
    """How a worker ended. Not `complete`: more requests than these were in its last `step`."""

    blame: Blame = Blame.NONE
    step: tuple[RequestKey, ...] = ()
    complete: bool = True
    why: str = ""


@value
class Judgement:
    """What becomes of the requests of a dead worker, by id. `released` go on at once. `cleared`
    were suspects of the same death as the one that is `convicted`."""

    released: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    convicted: str | None = None
    cleared: tuple[str, ...] = ()


class Standing(StrEnum):
    HELD = "held"
    TRIED = "tried"
    CLEARED = "cleared"
    RETURNING = "returning"


SUSPECTED = (Standing.HELD, Standing.TRIED)
WAITS = (Standing.HELD, Standing.CLEARED)


@dataclass(slots=True)
class Case:
    """Suspected of the `death` of that number."""

    standing: Standing
    death: int


@dataclass(slots=True)
class SuspectRequests:
    """Of one router. `suspected` and `convicted` count since its start. Without `cases` and
    `killed` nobody need ask here."""

    suspected: int = 0
    convicted: int = 0
    cases: dict[str, Case] = field(default_factory=dict)  # in the order of their turns
    killed: dict[str, None] = field(default_factory=dict)  # in a step that was killed once
    _dead: dict[Incarnation, dict[RequestKey, None]] = field(default_factory=dict)
    """# worker whose end is not known yet |-> its requests"""
    _left: dict[RequestKey, tuple[tuple[Incarnation, ...], float]] = field(default_factory=dict)
    _deaths: int = 0
    _turn_s: float = 0.0

    def standing(self, request_id: str) -> Standing | None:
        case = self.cases.get(request_id)
        return None if case is None else case.standing

    def of(self, *standings: Standing) -> list[str]:
        return [name for name, case in self.cases.items() if case.standing in standings]

    # --- deaths ---------------------------------------------------------------------------------

    def left(self, key: RequestKey, workers: tuple[Incarnation, ...], now_s: float) -> None:
        """Its attempt at these workers has failed; one of them may be dying."""
        self._left[key] = (workers, now_s)
        while now_s - next(iter(self._left.values()))[1] > LEFT_S:
            del self._left[next(iter(self._left))]

    def await_end(self, worker: Incarnation, keys: Iterable[RequestKey], now_s: float) -> list[str]:
        """The worker is gone, with these requests; how it ended is asked. Returns others whose
        attempts there failed just before."""
        left = [
            key
            for key, (workers, left_s) in self._left.items()
            if worker in workers and now_s - left_s <= LEFT_S
        ]
        self._dead[worker] = dict.fromkeys([*keys, *left])
        return [key.request_id for key in left]

    def judge(self, worker: Incarnation, ending: Ending, here: Collection[str]) -> Judgement:
        """`here` are the requests that have not ended."""
        dead = self._dead.pop(worker, {})
        ours = [*dict.fromkeys(key.request_id for key in dead if key.request_id in here)]
        blamed = [*self._blamed(ending, dead, here)]
        if self._was_alone(ending) and blamed and self.standing(blamed[0]) in SUSPECTED:
            return self._convict(blamed[0], ours)
        self._deaths += bool(blamed)
        for name in blamed:
            self.suspected += self.standing(name) not in SUSPECTED
            self.cases.pop(name, None)
            self.cases[name] = Case(Standing.HELD, self._deaths)
        released = tuple(name for name in ours if name not in blamed)
        return Judgement(released=released, suspects=tuple(blamed))

    def _blamed(
        self, ending: Ending, dead: Collection[RequestKey], here: Collection[str]
    ) -> Iterator[str]:
        step = ending.step if ending.complete else dead
        ids = dict.fromkeys(k.request_id for k in step if k in dead and k.request_id in here)
        if ending.blame is Blame.STEP:
            yield from ids
        elif ending.blame is Blame.SHARED:
            yield from (name for name in ids if name in self.killed)
            self.killed |= ids

    @staticmethod
    def _was_alone(ending: Ending) -> bool:
        return ending.complete and len({*ending.step}) == 1

    def _convict(self, culprit: str, ours: list[str]) -> Judgement:
        death = self.cases[culprit].death
        self.convicted += 1
        self.forget(culprit)
        cleared = [
            name
            for name, case in self.cases.items()
            if case.death == death and case.standing in SUSPECTED
        ]
        for name in cleared:
            case = self.cases[name]
            was_held = case.standing is Standing.HELD
            case.standing = Standing.CLEARED if was_held else Standing.RETURNING
        released = tuple(name for name in ours if name != culprit)
        return Judgement(released=released, convicted=culprit, cleared=tuple(cleared))

    # --- turns ----------------------------------------------------------------------------------

    def take_turns(self, active: int, now_s: float, *, stuck: bool) -> list[str]:
        """Those that may go to a worker now, of `active` requests. `stuck`: no worker has room for
        those that are tried."""
        turns = self._returning(max(LEAST_RETRIES, int(RETRY_SHARE * active)))
        tried = self.of(Standing.TRIED)
        if not tried or (stuck and now_s >= self._turn_s + TURN_S):
            turns += self._try(self.of(Standing.HELD)[:1], now_s)
        return turns

    def _returning(self, budget: int) -> list[str]:
        room = budget - len(self.of(Standing.RETURNING))
        turns = self.of(Standing.CLEARED)[: max(0, room)]
        for name in turns:
            self.cases[name].standing = Standing.RETURNING
        return turns

    def _try(self, names: list[str], now_s: float) -> list[str]:
        for name in names:
            self.cases[name].standing, self._turn_s = Standing.TRIED, now_s
        return names

    def yielded(self, request_id: str, tokens: int) -> bool:
        """It has yielded so many tokens since its last death. Returns whether it was a suspect, and
        is trusted again."""
        if tokens < ALONE_TOKENS:
            return False
        was_tried = self.standing(request_id) is Standing.TRIED
        self.forget(request_id)
        return was_tried

    def forget(self, request_id: str) -> None:
        """It has ended, or is trusted again."""
        self.cases.pop(request_id, None)
        self.killed.pop(request_id, None)

    def validate(self, here: Collection[str]) -> None:
        """Nothing is kept of requests that have ended."""
        assert self.cases.keys() <= {*here}, f"{self.cases.keys() - {*here}} are suspected"
        assert self.killed.keys() <= {*here}, f"{self.killed.keys() - {*here}} are marked"
        assert all(case.death <= self._deaths for case in self.cases.values())
