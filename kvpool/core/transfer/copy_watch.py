"""How long a copy of KV to or from a peer may take. Pure.

A worker makes the copies over one link one after another. So only the oldest of a peer is timed,
from the moment when it was first or the one before it had ended. A copy that takes longer than its
limit is ended through its link: that is dropped, and the copy fails. Its blocks are held until it
has failed indeed. Copies over a link that is gone are timed no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.core.transfer.commands import (
    DropLink,
    FetchPiece,
    PieceFetched,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks
from kvrelay.types import Incarnation, RequestKey

PeerCopy = WriteSlab | FetchPiece | PullBlocks
CopyEnd = SlabWritten | PieceFetched | BlocksPulled
_Name = tuple[bool, RequestKey, int] | int
"""Of a piece, whether it is written or read; of a pull its number."""

LEAST_S = 2.0
"""No copy has less: a busy machine may stop a thread for as long."""
TIMES_PREDICTED = 10.0
"""Several links share a network, and a link may have become slower since it was measured."""


def limit_s(predicted_s: float) -> float:
    return max(LEAST_S, TIMES_PREDICTED * predicted_s)


@dataclass(slots=True)
class _Line:
    """The copies with one peer, the oldest first. That one is timed from `since_s`."""

    since_s: float
    copies: dict[_Name, PeerCopy] = field(default_factory=dict)


@dataclass(slots=True)
class CopyWatch:
    _lines: dict[Incarnation, _Line] = field(default_factory=dict)
    _peers: dict[_Name, Incarnation] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._peers)

    def begin(self, copy: PeerCopy, now_s: float) -> None:
        """It was ordered, and comes after all others with its peer."""
        match copy:
            case WriteSlab(lent=lent):
                name: _Name = True, lent.key, lent.piece
            case FetchPiece(key=key, piece=piece):
                name = False, key, piece
            case PullBlocks(pull=pull):
                name = pull
        line = self._lines.get(copy.peer)
        if line is None:
            line = self._lines[copy.peer] = _Line(now_s)
        line.copies[name] = copy
        self._peers[name] = copy.peer

    def end(self, done: CopyEnd, now_s: float) -> None:
        """It has succeeded or failed. Nothing happens when it is not timed."""
        match done:
            case BlocksPulled(pull=pull):
                name: _Name = pull
            case SlabWritten(key=key, piece=piece) | PieceFetched(key=key, piece=piece):
                name = isinstance(done, SlabWritten), key, piece
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        line = self._lines[peer]
        del line.copies[name]
        line.since_s = now_s
        if not line.copies:
            del self._lines[peer]

    def lost(self, peer: Incarnation) -> None:
        """The link to it is gone: what is copied over it ends in its own time."""
        line = self._lines.pop(peer, None)
        for name in line.copies if line is not None else ():
            del self._peers[name]

    def overdue(self, predicted_s: Callable[[PeerCopy], float], now_s: float) -> list[DropLink]:
        """The links whose copy is over its limit, each once."""
        drops = [
            drop
            for peer, line in self._lines.items()
            if now_s - line.since_s > LEAST_S
            if (drop := _judge(peer, line, predicted_s, now_s)) is not None
        ]
        for drop in drops:
            self.lost(drop.peer)
        return drops

    def validate(self) -> None:
        lines = {(name, peer) for peer, line in self._lines.items() for name in line.copies}
        assert lines == {*self._peers.items()}, "a copy is watched for no peer, or twice"
        assert all(line.copies for line in self._lines.values()), "a peer without a copy"


def _judge(
    peer: Incarnation, line: _Line, predicted_s: Callable[[PeerCopy], float], now_s: float
) -> DropLink | None:
    copy = next(iter(line.copies.values()))
    took_s, most_s = now_s - line.since_s, limit_s(predicted_s(copy))
    if took_s <= most_s:
        return None
    reason = f"a copy of {copy.write.nbytes} bytes took over {most_s:.1f} s"
    return DropLink(peer=peer, reason=reason)
