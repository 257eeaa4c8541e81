"""Copies of a lane are queued on the device behind one another, and told of in order, by events.

Not run on a device: its streams and events are stood in for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.process.trace import NO_TRACE
from cluster.worker import mover as moving
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
        self.after: Callable[..., int] = super().copies
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
        return self.after(name, *of, **how)

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
        *(copy, WAITED, "told b", QUEUED),
        *(SETTLED, WAITED, "told c"),
    ]


def test_what_is_copied_by_the_host_is_told_of_at_once(held: Held) -> None:
    """Its peer needs not wait for the preparation of the next."""
    held.connection.window.return_value = Window(is_cuda=False)
    held.run_all(named("a", "gather"), named("b", "gather"))
    assert held.cuda.log == [
        *("write_slab", SETTLED, "told a"),
        *("write_slab", SETTLED, "told b"),
    ]


def test_one_that_fails_is_told_of_behind_the_one_before(held: Held) -> None:
    held.fails = {2}
    errors = held.run_all(*[named(name, "gather") for name in "abc"])
    assert errors == [None, "slab of another lease", None]
    told = [line for line in held.cuda.log if line.startswith("told")]
    assert told == ["told a", "told b", "told c"]
    assert held.cuda.log[:4] == ["write_slab", QUEUED, WAITED, "told a"]


def test_a_link_that_is_lost_in_between_costs_no_tell(held: Held) -> None:
    """The lane of the next job would be another one."""
    copied = held.after

    def lost(*of: Any, **how: Any) -> int:
        found = copied(*of, **how)
        held.links.line = lambda peer: "gone"
        held.links.connection.side_effect = PeerError("it is lost")
        return found

    held.after = lost
    errors = held.run_all(*[named(name, "gather") for name in "abc"])
    assert errors == [None, "it is lost", "it is lost"]
    told = [line for line in held.cuda.log if line.startswith("told")]
    assert told == ["told a", "told b", "told c"]


@dataclass(eq=False)
class Window:
    """A peer's slab."""

    is_cuda: bool = True


def test_a_peer_hears_of_a_slab_when_the_device_has_filled_it(held: Held) -> None:
    """Until then it stays mapped."""
    windows: list[weakref.ref[Window]] = []

    def window(region: object) -> Window:
        found = Window()
        windows.append(weakref.ref(found))
        return found

    def notify(peer: object, message: Any) -> None:
        assert windows["ab".index(message.key.request_id)]() is not None
        held.cuda.log.append(f"peer told {message.key.request_id}")

    held.connection.window = window
    held.links.notify = notify
    assert held.run_all(*[named(name, "gather") for name in "ab"]) == [None, None]
    assert held.cuda.log == [
        *("write_slab", QUEUED, "write_slab", WAITED, "peer told a", "told a", QUEUED),
        *(SETTLED, WAITED, "peer told b", "told b"),
    ]


def window_for(first: int) -> Callable[[object], object]:
    """The first so many are mapped; what comes then goes over a wire."""
    left = iter(range(first))
    return lambda region: None if next(left, None) is None else Window()


def test_who_waits_for_a_peer_tells_before(held: Held) -> None:
    """A read over a wire may take as long as the peer likes; so may a wait for staging."""
    held.connection.window = window_for(1)
    held.run_all(named("a", "gather"), named("b", "fetch"))
    assert held.cuda.log == [
        *("write_slab", QUEUED, WAITED, "told a"),
        *("fetch", SETTLED, "told b"),
    ]


def test_each_job_has_its_own_time(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next one's preparation took is not counted twice."""
    ticks = count()
    monkeypatch.setattr(moving, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    seconds: list[float] = []
    told = held.mover._post

    def put(outcome: Any) -> None:
        seconds.append(outcome.seconds)
        told(outcome)

    held.mover._post = put
    held.run_all(*[named(name, "scatter") for name in "abc"])
    assert min(seconds) > 0 and sum(seconds) < next(ticks)


def test_what_is_queued_is_told_of_when_the_mover_closes(held: Held) -> None:
    """The jobs behind it are dropped."""
    go_on, copied = threading.Event(), held.after

    def slow(*of: Any, **how: Any) -> int:
        found = copied(*of, **how)
        assert go_on.wait(PATIENCE_S)
        return found

    held.after = slow
    for name in "ab":
        held.mover.put(named(name, "scatter"))
    held.begins.set()
    until(lambda: "read_slab" in held.cuda.log)
    closes = threading.Thread(target=held.mover.close)
    closes.start()
    until(lambda: held.mover._lanes._closed)
    go_on.set()
    closes.join(PATIENCE_S)
    assert held.cuda.log == ["read_slab", QUEUED, SETTLED, WAITED, "told a"]
