"""Conversations that clients go on with by the id of an answer: kept for a bounded time, in bounded
memory. Pure.

Each answer is a turn that goes on behind an earlier one, so a long conversation is kept once. A
turn that has expired stays while a later turn goes on behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvrelay.types import value


@value
class KeptBounds:
    """At most `answers` are kept, in `size_bytes` of text, each for `age_s` since it was given."""

    answers: int = 10_000
    size_bytes: int = 256 * 2**20
    age_s: float = 3600.0


DEFAULT_KEPT = KeptBounds()


@dataclass(slots=True, eq=False)
class Turn:
    """`items` are what the turn added, `answer` is what its client got; both are JSON."""

    before: Turn | None
    items: bytes
    answer: bytes
    holders: int = 0
    """Its answer's id, while it is kept, and the turns behind it."""

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.answer)

    def conversation(self) -> list[bytes]:
        """The items of all turns, oldest first."""
        turns: list[bytes] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn.items)
            turn = turn.before
        return turns[::-1]


@dataclass(slots=True)
class _Owner:
    """# id |-> its turn, oldest first"""

    turns: OrderedDict[str, Turn] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class KeptConversations:
    """An id is known to its owner alone. When memory is short, the owner with most of it loses its
    oldest answer, so nobody pushes out what others keep within their share."""

    def __init__(self, bounds: KeptBounds) -> None:
        self._bounds = bounds
        self._owners: dict[str, _Owner] = {}
        self._by_age: OrderedDict[tuple[str, str], float] = OrderedDict()
        """# (owner, id) |-> when it was kept, oldest first"""
        self.size_bytes = 0

    @property
    def answers(self) -> int:
        return len(self._by_age)

    def find(self, owner: str, answer_id: str, now_s: float) -> Turn | None:
        self._expire(now_s)
        known = self._owners.get(owner)
        return known.turns.get(answer_id) if known is not None else None

    def keep(
        self,
        owner: str,
        answer_id: str,
        *,
        before: Turn | None,
        items: bytes,
        answer: bytes,
        now_s: float,
    ) -> None:
        """`before` may have expired since it was found. An answer that is too large for the bounds
        is not kept."""
        self._expire(now_s)
        self.forget(owner, answer_id)
        turn = Turn(before, items, answer)
        self._hold(owner, turn)
        self._owners[owner].turns[answer_id] = turn
        self._by_age[owner, answer_id] = now_s
        while self.answers > self._bounds.answers or self.size_bytes > self._bounds.size_bytes:
            self._forget_oldest(max(self._owners, key=lambda one: self._owners[one].size_bytes))

    def forget(self, owner: str, answer_id: str) -> bool:
        """Whether it was known."""
        known = self._owners.get(owner)
        turn = known.turns.pop(answer_id, None) if known is not None else None
        if turn is None:
            return False
        del self._by_age[owner, answer_id]
        self._let_go(owner, turn)
        return True

    def _hold(self, owner: str, turn: Turn) -> None:
        """Counts the turn, and those before it that nobody held any more."""
        mine = self._owners.setdefault(owner, _Owner())
        held: Turn | None = turn
        while held is not None:
            held.holders += 1
            if held.holders > 1:
                break
            mine.size_bytes += held.size_bytes
            self.size_bytes += held.size_bytes
            held = held.before

    def _let_go(self, owner: str, turn: Turn) -> None:
        mine = self._owners[owner]
        held: Turn | None = turn
        while held is not None:
            held.holders -= 1
            if held.holders:
                break
            mine.size_bytes -= held.size_bytes
            self.size_bytes -= held.size_bytes
            held = held.before
        if not mine.turns:
            del self._owners[owner]

    def _forget_oldest(self, owner: str) -> None:
        self.forget(owner, next(iter(self._owners[owner].turns)))

    def _expire(self, now_s: float) -> None:
        while self._by_age:
            oldest, at_s = next(iter(self._by_age.items()))
            if now_s - at_s < self._bounds.age_s:
                break
            self.forget(*oldest)

    def validate(self) -> None:
        """Each turn that can be reached is counted once, and by as many as hold it."""
        answers = size_bytes = 0
        for owner in self._owners.values():
            reached: dict[int, Turn] = {}
            holders: dict[int, int] = {}
            for turn in owner.turns.values():
                link: Turn | None = turn
                while link is not None:
                    holders[id(link)] = holders.get(id(link), 0) + 1
                    known = id(link) in reached
                    reached[id(link)] = link
                    link = None if known else link.before
            own_bytes = sum(turn.size_bytes for turn in reached.values())
            assert own_bytes == owner.size_bytes, (own_bytes, owner.size_bytes)
            assert all(turn.holders == holders[key] for key, turn in reached.items()), holders
            answers, size_bytes = answers + len(owner.turns), size_bytes + own_bytes
        assert (answers, size_bytes) == (self.answers, self.size_bytes)
