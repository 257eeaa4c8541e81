"""From what clients saw to figures: wrong tokens, and the pauses of each fault. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.chaos.faults import Fault, Kind, Seen
from bench.chaos.prompts import Answer
from bench.chaos.streams import Outcome, StreamRecord

BEFORE_S = 0.25
"""A pause that a fault makes may have begun so long before it: with the last token."""
ELSEWHERE_GOAL_S = 0.25
"""For streams that the faulty process does not serve, while it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """The longest pause of each stream, in seconds, sorted."""

    values_s: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """0 if there is none."""
        if not self.values_s:
            return 0.0
        return self.values_s[min(len(self.values_s) - 1, int(share * len(self.values_s)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRow:
    """Pauses of all faults of one group. `goal_s` None: there is none. `alone`: of faults that
    came while no other was in force, and without another within the pause."""

    group: str
    whose: str
    faults: int
    all: Pauses
    alone: Pauses
    goal_s: float | None


def goal_of(fault: Fault, *, on_it: bool) -> float | None:
    """The p99 that docs/faults.md promises."""
    if not on_it:
        return ELSEWHERE_GOAL_S if fault.kind is Kind.STOP else None
    goals = {
        ("decode", Kind.KILL): 3.0,
        ("decode", Kind.STOP): 8.0,
        ("router", Kind.KILL): 1.0,
        ("router", Kind.STOP): 6.0,
    }
    return goals.get((fault.role, fault.kind))


def gaps_of(record: StreamRecord) -> Iterator[tuple[float, float]]:
    """(when it began, when it ended) of each pause between two chunks."""
    return zip(record.came_s, record.came_s[1:], strict=False)


def longest_gaps_s(records: Sequence[StreamRecord]) -> Pauses:
    longest = (max((b - a for a, b in gaps_of(one)), default=0.0) for one in records)
    return Pauses(values_s=tuple(sorted(longest)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    length_s: float
    alone: bool


def pause_rows(records: Sequence[StreamRecord], seen: Sequence[Seen]) -> list[PauseRow]:
    """Each pause has one owner. `seen` is in order of time."""
    found: dict[tuple[str, bool], list[_Pause]] = defaultdict(list)
    faults: dict[str, list[Seen]] = defaultdict(list)
    for one in seen:
        faults[one.fault.group].append(one)
    for record in records:
        for i, pause in _longest_of(record, seen).items():
            found[seen[i].fault.group, record.number in seen[i].on_it].append(pause)
    return [
        _row(group, on_it, faults[group], found[group, on_it])
        for group in sorted(faults)
        for on_it in (True, False)
        if found[group, on_it]
    ]


def _longest_of(record: StreamRecord, seen: Sequence[Seen]) -> dict[int, _Pause]:
    """# fault |-> the longest pause that it owns of a stream that had begun before it"""
    found: dict[int, _Pause] = {}
    for begin_s, end_s in gaps_of(record):
        i = owner(record.number, begin_s, end_s, seen)
        if i is None or record.number not in seen[i].live or end_s <= seen[i].at_s:
            continue
        if i not in found or end_s - begin_s > found[i].length_s:
            found[i] = _Pause(length_s=end_s - begin_s, alone=_is_alone(i, end_s, seen))
    return found


def owner(number: int, begin_s: float, end_s: float, seen: Sequence[Seen]) -> int | None:
    """The first fault within the pause whose target served the stream; else the last one before
    the pause."""
    first = bisect_left(seen, begin_s, key=lambda one: one.at_s)
    behind = bisect_left(seen, end_s, key=lambda one: one.at_s)
    hit = next((i for i in range(first, behind) if number in seen[i].on_it), None)
    if hit is not None:
        return hit
    before = bisect_left(seen, begin_s + BEFORE_S, key=lambda one: one.at_s) - 1
    return before if before >= 0 else None


def _is_alone(i: int, end_s: float, seen: Sequence[Seen]) -> bool:
    return seen[i].in_force == 0 and (i + 1 == len(seen) or seen[i + 1].at_s > end_s)


def _row(group: str, on_it: bool, seen: Sequence[Seen], pauses: Sequence[_Pause]) -> PauseRow:
    return PauseRow(
        group=group,
        whose="on it" if on_it else "elsewhere",
        faults=len(seen),
        all=Pauses(values_s=tuple(sorted(one.length_s for one in pauses))),
        alone=Pauses(values_s=tuple(sorted(one.length_s for one in pauses if one.alone))),
        goal_s=goal_of(seen[0].fault, on_it=on_it),
    )


def wrong(
    records: Sequence[StreamRecord], expected: Mapping[int, Answer]
) -> list[tuple[StreamRecord, str]]:
    """Completed streams whose tokens or text are not those of the run without faults, and failed
    ones that had delivered something else before."""
    found = []
    for record in records:
        if record.index in expected and (why := _difference(record, expected[record.index])):
            found.append((record, why))
    return found


def _difference(record: StreamRecord, expected: Answer) -> str:
    if record.outcome is Outcome.COMPLETED and record.answer == expected:
        return ""
    for choice, ((ids, text), (right, right_text)) in enumerate(
        zip(record.answer, expected, strict=False)
    ):
        same = next((i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), None)
        if same is not None:
            return f"choice {choice}: token {same} is {ids[same]}, not {right[same]}"
        if len(ids) > len(right):
            return f"choice {choice}: {len(ids)} tokens, not {len(right)}"
        if record.outcome is Outcome.COMPLETED and len(ids) < len(right):
            return f"choice {choice}: ended after {len(ids)} of {len(right)} tokens"
        if record.outcome is Outcome.COMPLETED and text != right_text:
            return f"choice {choice}: the same tokens, another text"
    return ""


def capacity_gone(seen: Sequence[Seen], workers: int, end_s: float, restart_s: float) -> float:
    """Seconds of all workers together that faults have taken, as a share of their number."""
    gone_s = 0.0
    for one in seen:
        if one.fault.role in ("prefill", "decode") and one.fault.kind in (Kind.KILL, Kind.STOP):
            gone_s += min(end_s, one.until_s + restart_s) - one.at_s
    return gone_s / workers
