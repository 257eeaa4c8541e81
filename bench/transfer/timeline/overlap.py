"""How much of a handoff the prompt's compute hides, as the workers' traces tell. Pure.

What a worker's device tells of a step or of a copy of KV counts, and the host's range of the same
name only where there is none. KV is on its way while it is gathered, written, scattered or fetched:
the kernels' time on a device, and a link's time on the host. A write's range of the host begins
with its wait for the gather, which counts as the gather alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.transfer.timeline.chrome import Range

MOVES = ("gather", "write", "scatter", "fetch")
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One request's. Its transfer is the time in which either worker moves any of its KV.

    What is neither hidden nor exposed fell between two chunks. `left_groups`: of the pieces that
    the last chunk is cut into, how many were still to be moved when it was computed; `groups` are
    all of them. `commit_s` is from then until all is there and committed. `within_us`: how far the
    times of devices may be off; None: all are of the host.
    """

    transfer_s: float
    hidden_s: float
    exposed_s: float
    commit_s: float
    groups: int
    left_groups: float
    decode_steps: int
    within_us: int | None = None

    @property
    def hidden_share(self) -> float:
        return self.hidden_s / self.transfer_s if self.transfer_s else 0.0


def handoffs(ranges: Sequence[Range], *, chunks: int) -> list[Handoff]:
    """Those whose prompt took at least so many chunks, in the order of their compute."""
    ranges, counted = _best(ranges), dict[str, int]()
    for one in sorted(_named(ranges, "prefill chunk"), key=lambda r: r.start_s):
        for request in one.args["requests"]:
            counted[request] = counted.get(request, 0) + 1
    return [handoff(ranges, request) for request, count in counted.items() if count >= chunks]


def handoff(ranges: Sequence[Range], request: str) -> Handoff:
    ranges = _best(ranges)
    computes = [r for r in _named(ranges, "prefill chunk") if request in r.args["requests"]]
    moves = _moves(ranges, request)
    commits = [r for r in _named(ranges, "commit") if r.args["request"] == request]
    computed_s = max(r.end_s for r in computes)
    done_s = max(r.end_s for r in (*moves, *commits))
    moving, after = _union(moves), [(computed_s, max(computed_s, done_s))]
    last = _last_chunk(moves)
    return Handoff(
        transfer_s=_length(moving),
        hidden_s=_common(moving, _union(computes)),
        exposed_s=_common(moving, after),
        commit_s=max(0.0, done_s - computed_s),
        groups=len(last),
        left_groups=sum(_share_after(piece, computed_s) for piece in last),
        decode_steps=_steps_during(ranges, computes[0].start_s, done_s),
        within_us=max(
            (r.args["within_us"] for r in (*computes, *moves) if r.on_device), default=None
        ),
    )


def _best(ranges: Sequence[Range]) -> Sequence[Range]:
    """Without those of a host whose device tells of the same."""
    told = {(r.process, r.name) for r in ranges if r.on_device}
    return [r for r in ranges if r.on_device or (r.process, r.name) not in told]


def _within_us(ranges: Iterable[Range]) -> int | None:
    return max((r.args["within_us"] for r in ranges if r.on_device), default=None)


def _moves(ranges: Iterable[Range], request: str) -> list[Range]:
    moves = [r for r in ranges if r.name in MOVES and r.args["request"] == request]
    gathered_s = {r.args["piece"]: r.end_s for r in moves if r.name == "gather"}
    return [_behind(r, gathered_s.get(r.args["piece"], r.start_s)) for r in moves]


def _behind(move: Range, gathered_s: float) -> Range:
    if move.name != "write":
        return move
    return replace(move, start_s=max(move.start_s, gathered_s))


def _named(ranges: Iterable[Range], name: str) -> list[Range]:
    return [r for r in ranges if r.name == name]


def _last_chunk(moves: Sequence[Range]) -> list[list[Range]]:
    """The moves of each piece that the prompt ends with."""
    end = max((r.args["end"] for r in moves), default=0)
    pieces = {r.args["piece"] for r in moves if r.args["end"] == end}
    return [[r for r in moves if r.args["piece"] == piece] for piece in sorted(pieces)]


def _share_after(piece: Sequence[Range], at_s: float) -> float:
    whole = _union(piece)
    return 1 - _common(whole, [(0.0, at_s)]) / _length(whole)


def _steps_during(ranges: Sequence[Range], start_s: float, end_s: float) -> int:
    steps = _named(ranges, "decode step")
    return sum(r.start_s < end_s and r.end_s > start_s for r in steps)


def _union(ranges: Iterable[Range]) -> list[Interval]:
    """Disjoint, in order."""
    found: list[Interval] = []
    for start, end in sorted((r.start_s, r.end_s) for r in ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _common(ours: Sequence[Interval], theirs: Sequence[Interval]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ours for b in theirs)
