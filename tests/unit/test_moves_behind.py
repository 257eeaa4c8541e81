"""Copies of a lane are queued on the device behind one another, and told of in order, by events.

Not run on a device: its streams and events are stood in for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.process.trace import NO_TRACE
from kvpool.core.transfer.commands import FetchPiece, ScatterSlab, WriteSlab
from kvrelay.errors import PeerError
from kvrelay.types import RequestKey
from tests.contract.transport_kit import until
from tests.unit.test_device_clock import PATIENCE_S, Cuda, Moves, cuda, moves_of

__all__ = ["cuda"]
QUEUED, WAITED, SETTLED = "event on stream 1", "waited for", "stream 1 synchronized"


class Held(Moves):
    """Its first copy waits until all jobs are there. `told` is in the log too."""

    def __init__(self, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begins = threading.Event()
        self.fails: set[int] = set()
        self._copied = 0
        super().__init__(cuda, monkeypatch, NO_TRACE)
        told = self.posted.put

        def put(outcome: Any) -> None:
            cuda.log.append(f"told {outcome.key.request_id}")
            told(outcome)

        self.mover._post = put

    def copies(self, name: str, *of: object, **how: object) -> int:
        assert self.begins.wait(PATIENCE_S)
        self._copied += 1
        if self._copied in self.fails:
            raise PeerError("slab of another lease")
        return super().copies(name, *of, **how)

    def run_all(self, *jobs: WriteSlab | ScatterSlab | FetchPiece) -> list[str | None]:
        """Their errors."""
        for job in jobs:
            self.mover.put(job)
        self.begins.set()
        found = [self.posted.get(timeout=PATIENCE_S).error for _ in jobs]
        self.mover.close()
        return found


@pytest.fixture
def held(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(cuda, monkeypatch)


def named(name: str, kind: str) -> Any:
    job, _, _ = moves_of(kind)
    key = RequestKey(name, 0)
    if isinstance(job, ScatterSlab):
        return replace(job, filled=replace(job.filled, key=key))
    if isinstance(job, WriteSlab):
        return replace(job, lent=replace(job.lent, key=key))
    return replace(job, key=key)


@pytest.mark.parametrize(
    ("kind", "copy"), [("scatter", "read_slab"), ("gather", "write_slab"), ("fetch", "fetch")]
)
def test_the_next_is_prepared_while_the_device_copies(held: Held, kind: str, copy: str) -> None:
    """Nobody waits for the stream but behind the last."""
    jobs = [named(name, kind) for name in "abc"]
    assert held.run_all(*jobs) == [None] * 3
    assert held.cuda.log == [
        *(copy, QUEUED),
        *(copy, WAITED, "told a", QUEUED),
        *(copy, WAITED, "told b", SETTLED, "told c"),
    ]


def test_one_that_fails_is_told_of_behind_the_one_before(held: Held) -> None:
    held.fails = {2}
    errors = held.run_all(*[named(name, "scatter") for name in "abc"])
    assert errors == [None, "slab of another lease", None]
    told = [line for line in held.cuda.log if line.startswith("told")]
    assert told == ["told a", "told b", "told c"]
    assert held.cuda.log[:4] == ["read_slab", QUEUED, WAITED, "told a"]


def test_a_peer_hears_of_a_slab_when_the_device_has_filled_it(held: Held) -> None:
    def notify(peer: object, message: Any) -> None:
        held.cuda.log.append(f"peer told {message.key.request_id}")

    held.links.notify = notify
    held.run_all(*[named(name, "gather") for name in "ab"])
    assert held.cuda.log == [
        *("write_slab", QUEUED, "write_slab", WAITED, "peer told a", "told a"),
        *(SETTLED, "peer told b", "told b"),
    ]


def window_for(first: int) -> Callable[[object], object]:
    """The first so many are mapped; what comes then goes over a wire."""
    left = iter(range(first))
    return lambda region: next(left, None) is not None or None


def test_who_waits_for_a_peer_tells_before(held: Held) -> None:
    """A read over a wire may take as long as the peer likes; so may a wait for staging."""
    held.connection.window = window_for(1)
    held.run_all(named("a", "gather"), named("b", "fetch"))
    assert held.cuda.log == [
        *("write_slab", QUEUED, WAITED, "told a"),
        *("fetch", SETTLED, "told b"),
    ]


def test_slabs_are_not_freed_under_a_copy(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs behind it were dropped."""
    monkeypatch.setattr(held.mover._lanes, "has_more", lambda lane: True)
    freed = held.links.endpoints.deregister
    freed.side_effect = lambda region: held.cuda.log.append("freed")
    held.begins.set()
    held.mover.put(named("a", "scatter"))
    until(lambda: bool(held.mover._untold))
    held.mover.close()
    assert held.cuda.log == ["read_slab", QUEUED, WAITED, "freed"]
    assert held.posted.empty()
