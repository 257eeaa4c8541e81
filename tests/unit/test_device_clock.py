"""Ranges of a device in a trace: which events are recorded, on which stream, and which time of the
host they are.

Not run on a device: its clock, streams and events are stood in for.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch

from cluster.process.trace import NO_TRACE, Trace, TraceFile, open_trace
from cluster.worker import build
from cluster.worker import mover as moving
from cluster.worker.device import TracedEngine
from cluster.worker.mover import Mover
from engine.device.clock import ANCHOR_LASTS_S, DeviceClock, clock
from engine.device.streams import StepStream
from engine.runner import Engine
from kvpool.core.transfer.commands import (
    FetchPiece,
    PieceFetched,
    ScatterSlab,
    SlabScattered,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.messages import SlabFilled
from kvpool.core.transfer.write import Side
from kvpool.memory.kv_memory import KvMemory
from tests.unit.test_layer_marks import batch, engine
from tests.unit.test_prefill_scheduler import write_of
from tests.unit.worker_kit import LAYOUT

SECOND = torch.device("cuda:1")
PATIENCE_S = 20.0
AHEAD_S = 5000.0
"""Of the host's clock the device's is so far ahead."""


@dataclass(eq=False)
class Stream:
    """Does what is queued on it for `busy_s` from now on."""

    cuda: Cuda = field(repr=False)
    name: str
    index: int = 1
    idle_at_s: float = 0.0
    number: int = 1

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def queue(self, busy_s: float) -> None:
        self.idle_at_s = max(self.cuda.now_s, self.idle_at_s) + busy_s

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"{self.name} synchronized")
        self.cuda.reach(self.idle_at_s)


class Event:
    """Reached when its stream has done what was queued before."""

    def __init__(self, cuda: Cuda, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda, self.timed = cuda, enable_timing
        self.at_s = 0.0  # of the host's clock

    def record(self, stream: Stream) -> None:
        self.at_s = max(self.cuda.now_s, stream.idle_at_s)
        self.cuda.log.append(f"{'timed' if self.timed else 'event'} on {stream.name}")

    def query(self) -> bool:
        return self.cuda.now_s >= self.at_s

    def synchronize(self) -> None:
        """Some of the host's time passes before and after."""
        before_s, after_s = self.cuda.waits.pop(0) if self.cuda.waits else (0.0, 0.0)
        self.at_s += before_s
        self.cuda.reach(self.at_s)
        self.cuda.now_s += after_s
        if not self.timed:
            self.cuda.log.append("waited for")

    def elapsed_time(self, other: Event) -> float:
        """As CUDA has it: what isn't reached or timed is refused, the rest is a float32."""
        assert self.timed and other.timed and self.query() and other.query()
        on_device = [(AHEAD_S + at_s) * (1 + self.cuda.drift) for at_s in (self.at_s, other.at_s)]
        return float(np.float32(1e3 * (on_device[1] - on_device[0])))


class Cuda:
    """`waits`: what the next waits for events take, before and after the device reaches them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.drift = 0.0
        self.log: list[str] = []
        self.waits: list[tuple[float, float]] = []
        self.own = Stream(self, "the device's own")
        self.current: dict[int, Stream] = {}  # thread |-> its stream
        self.made = 0

    def reach(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)

    def new_stream(self, device: torch.device, priority: int = 0) -> Stream:
        assert device == SECOND
        self.made += 1
        return Stream(self, f"stream {self.made}")

    def current_stream(self, device: torch.device) -> Stream:
        assert device == SECOND
        return self.current.get(threading.get_ident(), self.own)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        thread, before = threading.get_ident(), self.current_stream(SECOND)
        self.current[thread] = stream
        yield
        self.current[thread] = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "Event", lambda **kind: Event(made, **kind))
    monkeypatch.setattr(torch.cuda, "Stream", made.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


@pytest.fixture
def timed(cuda: Cuda) -> DeviceClock:
    return DeviceClock(SECOND, now=lambda: cuda.now_s)


def test_work_has_the_hosts_time_of_when_its_stream_reached_it(
    cuda: Cuda, timed: DeviceClock
) -> None:
    """Not when it was queued."""
    busy = Stream(cuda, "busy")
    busy.queue(0.2)
    work = timed.begin(busy)  # type: ignore[arg-type]
    busy.queue(0.03)
    work.end()
    assert not work.is_done
    cuda.reach(100.225)
    assert not work.is_done, "its beginning is reached, and its end is not"
    cuda.reach(100.3)
    assert work.is_done
    assert work.times_s == pytest.approx((100.2, 100.23), abs=1e-7)


def test_work_that_has_not_ended_is_not_done(cuda: Cuda, timed: DeviceClock) -> None:
    assert not timed.begin(None).is_done


def test_the_anchor_is_the_shortest_of_several_tries(cuda: Cuda, timed: DeviceClock) -> None:
    """Its time is the middle, its error half of it; the others waited for the device's turn."""
    cuda.waits = [(0.004, 0), (0.004, 0), (1.5e-5, 0.5e-5), (0, 0.003), (0.004, 0.004)]
    work = timed.begin(cuda.own)  # type: ignore[arg-type]
    begun_s = cuda.now_s
    work.end()
    started_s, _ = work.times_s
    assert abs(started_s - begun_s) <= 1e-5 + 1e-8, "the device reached it 5 us off the middle"
    assert abs(started_s - begun_s) == pytest.approx(0.5e-5, abs=1e-7)
    assert work.within_s == pytest.approx(1e-5, abs=2e-6)


def test_the_anchor_waits_on_a_stream_of_its_own(cuda: Cuda, timed: DeviceClock) -> None:
    busy = Stream(cuda, "busy")
    busy.queue(60.0)
    timed.begin(busy)  # type: ignore[arg-type]
    assert cuda.now_s == 100.0, "nobody waited for what is queued"
    assert cuda.log == ["timed on stream 1"] * 5 + ["timed on busy"]


def test_an_old_anchor_is_renewed(cuda: Cuda, timed: DeviceClock) -> None:
    """So neither the drift of the clocks nor float32 is seen after hours: there the steps of
    CUDA's numbers are a millisecond."""
    cuda.drift = 5e-5
    early = timed.begin(cuda.own)  # type: ignore[arg-type]
    early.end()
    for begun_s in (100.2, 100.4, 20_000.2, 20_000.3):
        cuda.now_s = begun_s
        work = timed.begin(cuda.own)  # type: ignore[arg-type]
        cuda.now_s += 0.01
        work.end()
        assert work.times_s == pytest.approx((begun_s, begun_s + 0.01), abs=2e-5)
        assert abs(work.times_s[1] - begun_s - 0.01) <= work.within_s
    assert cuda.log.count("timed on stream 1") == 3 * 5, "as long as it lasts it is kept"
    assert ANCHOR_LASTS_S < 1
    assert early.times_s == pytest.approx((100.0, 100.0)), "it keeps the one that it began with"


def test_only_a_cuda_device_has_a_clock() -> None:
    assert clock("cpu") is None
    assert isinstance(clock("cuda:1"), DeviceClock)


@pytest.fixture
def trace(tmp_path: Path, timed: DeviceClock) -> Iterator[TraceFile]:
    opened = TraceFile(tmp_path / "t.json", "w", clock=timed)
    yield opened
    opened.close()


def written(trace: Trace, tmp_path: Path) -> list[dict[str, Any]]:
    trace.close()
    return json.loads((tmp_path / "t.json").read_text())  # type: ignore[no-any-return]


def of_device(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "device"]


def test_a_devices_ranges_have_a_track_of_their_own(
    cuda: Cuda, trace: TraceFile, tmp_path: Path
) -> None:
    with trace.queued("gather", request="r"):
        cuda.own.queue(0.5)
    cuda.reach(101.0)
    events = written(trace, tmp_path)
    named = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    host, device = (event for event in events if event["ph"] == "X")
    assert host["name"] == device["name"] == "gather"
    assert "cat" not in host and device["cat"] == "device"
    thread = threading.current_thread().name
    assert (named[host["tid"]], named[device["tid"]]) == (thread, f"device: {thread}")
    assert (device["ts"], device["dur"]) == pytest.approx((100e6, 0.5e6), abs=1)
    assert host["args"] == {"request": "r"}
    assert device["args"] == {"request": "r", "within_us": 50}, "half a second of drift"


def test_a_range_is_written_once_the_device_has_done_it(
    cuda: Cuda, trace: TraceFile, tmp_path: Path
) -> None:
    """Also behind one that takes longer, on another stream; what is never done is left out."""
    long, never = Stream(cuda, "long"), Stream(cuda, "never")
    with trace.on_device("never", never):  # type: ignore[arg-type]
        never.queue(1e9)
    with trace.on_device("long", long):  # type: ignore[arg-type]
        long.queue(0.5)
    with trace.on_device("short"):
        cuda.own.queue(0.1)
    cuda.reach(100.2)
    with trace.on_device("next"):
        pass
    cuda.reach(101.0)
    names = [event["name"] for event in of_device(written(trace, tmp_path))]
    assert names == ["short", "next", "long"]


def test_no_range_of_a_track_begins_before_the_last_one_ends(
    cuda: Cuda, trace: TraceFile, tmp_path: Path
) -> None:
    """Of two ranges one behind the other the first has an anchor that is 2 ms late, and the second
    one that is 2 ms early. Both say so."""
    cuda.waits = [(0.0, 0.004)] * 5
    with trace.on_device("first"):
        cuda.own.queue(0.6)
    cuda.reach(100.4)
    cuda.waits = [(0.004, 0.0)] * 5
    with trace.on_device("second"):
        cuda.own.queue(0.3)
    cuda.reach(102.0)
    first, second = of_device(written(trace, tmp_path))
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=1)
    assert second["dur"] == pytest.approx(0.296e6, abs=1)
    assert all(event["args"]["within_us"] >= 2000 for event in (first, second))


def test_on_a_cpu_a_trace_has_the_hosts_ranges_alone(tmp_path: Path) -> None:
    made = open_trace(str(tmp_path), "w", None, clock("cpu"))
    with made.queued("gather"), made.on_device("decode step"):
        pass
    made.close()
    (path,) = tmp_path.iterdir()
    assert [e["name"] for e in json.loads(path.read_text()) if e["ph"] == "X"] == ["gather"]


@pytest.fixture
def loaded(tmp_path: Path) -> Engine:
    return engine(tmp_path, "cpu")


@pytest.fixture
def own(loaded: Engine, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its model runs on the CPU; its streams and events are the device's. Tests name it before
    the device: it is loaded where there is none."""
    made = loaded
    made._stream = StepStream(SECOND, goes_first=False)
    computed = made.logits

    def logits(*asked: Any) -> torch.Tensor:
        cuda.log.append("computes")
        made.stream.queue(0.25)  # type: ignore[union-attr]
        return computed(*asked)

    monkeypatch.setattr(made, "logits", logits)
    return made


STEP = ["stream 1 waits for the device's own", "computes", "event on stream 1"]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_is_timed_on_its_stream_behind_all_that_it_launches(
    own: Engine, cuda: Cuda, trace: TraceFile, tmp_path: Path, ahead: bool
) -> None:
    """Nobody waits for it but as without a trace."""
    traced = TracedEngine(own, trace, own.stream)
    if ahead:
        traced.launch(batch(own)).collect()
    else:
        traced.run(batch(own))
    anchors = ["timed on stream 3"] * 5
    assert cuda.log == [*anchors, "timed on stream 1", *STEP, "timed on stream 1", "waited for"]
    events = written(trace, tmp_path)
    (found,) = of_device(events)
    assert found["name"] == "prefill chunk" and found["args"]["requests"] == ["a"]
    assert (found["ts"], found["dur"]) == pytest.approx((100e6, 0.25e6), abs=1)
    assert len([e for e in events if e["ph"] == "X"]) == 2, "and the host's own"


def test_a_step_behind_another_begins_when_that_one_ends(
    own: Engine, cuda: Cuda, trace: TraceFile, tmp_path: Path
) -> None:
    traced = TracedEngine(own, trace, own.stream)
    first = traced.launch(batch(own))
    second = traced.launch(batch(own), before=first)
    first.collect()
    second.collect()
    found = of_device(written(trace, tmp_path))
    assert [event["ts"] / 1e6 for event in found] == pytest.approx([100.0, 100.25], abs=1e-5)
    assert [event["dur"] / 1e6 for event in found] == pytest.approx([0.25, 0.25], abs=1e-5)


def test_an_untraced_step_records_no_timing_event(own: Engine, cuda: Cuda) -> None:
    own.run(batch(own))
    assert cuda.log == [*STEP, "waited for"]


class Kv(KvMemory):
    """Of the second device, without memory."""

    def __init__(self) -> None:
        self.device = SECOND
        self.layout = LAYOUT


class Moves:
    """A mover whose copies take the device a tenth of a second each, and the host none."""

    def __init__(self, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
        self.cuda = cuda
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links, self.connection = MagicMock(), Mock(peer_address="ucx:peer")
        self.links.line = str
        self.links.connection.return_value = self.connection
        for name in ("write_slab", "read_slab", "fetch"):
            monkeypatch.setattr(moving, name, partial(self.copies, name))
        post, told = self.posted.put, {"trace": trace}
        self.mover = Mover(
            Kv(), self.links, "", slabs=1, slab_bytes=9, post=post, crashed=post, **told
        )  # type: ignore[arg-type]

    def copies(self, name: str, *_: object, **__: object) -> int:
        self.cuda.log.append(name)
        self.cuda.current_stream(SECOND).queue(0.1)
        return 9

    def run(self, job: WriteSlab | ScatterSlab | FetchPiece) -> None:
        self.mover.put(job)
        outcome = self.posted.get(timeout=PATIENCE_S)
        self.mover.close()
        assert isinstance(outcome, SlabWritten | SlabScattered | PieceFetched), outcome
        assert outcome.error is None


def moves_of(kind: str) -> tuple[WriteSlab | ScatterSlab | FetchPiece, str, str]:
    """A job, the range's name, and which copy it makes."""
    gathers = write_of("a", 3)
    rest = {"peer": gathers.peer, "write": gathers.write, "tables": gathers.tables}
    lent = gathers.lent
    if kind == "scatter":
        filled = SlabFilled(key=lent.key, piece=0, slab_id=lent.slab_id, lease_id=lent.lease_id)
        return ScatterSlab(filled=filled, piece=gathers.piece, **rest), kind, "read_slab"  # type: ignore[arg-type]
    if kind == "fetch":
        source, kv = Side(tables=((),), block_size=16), Mock()
        return FetchPiece(key=lent.key, piece=0, kv=kv, source=source, **rest), kind, "fetch"  # type: ignore[arg-type]
    return gathers, "gather", "write_slab"


def waits(kind: str) -> list[str]:
    if kind == "gather into staging":
        return ["event on stream 1", "waited for"]
    return ["event on stream 1", "stream 1 synchronized", "waited for"]


KINDS = ["gather into a window", "gather into staging", "scatter", "fetch"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_of_kv_is_timed_on_its_stream_before_anybody_waits(
    kind: str,
    cuda: Cuda,
    trace: TraceFile,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """So its range ends with the device's copy, and not when the host has noticed."""
    moves = Moves(cuda, monkeypatch, trace)
    if kind == "gather into staging":
        moves.connection.window.return_value = None
    job, name, copy = moves_of(kind)
    moves.run(job)
    anchors = ["timed on stream 2"] * 5
    assert cuda.log == [*anchors, "timed on stream 1", copy, "timed on stream 1", *waits(kind)]
    (found,) = of_device(written(trace, tmp_path))
    assert found["name"] == name and found["args"]["request"] == "a"
    assert (found["ts"], found["dur"]) == pytest.approx((100e6, 0.1e6), abs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untraced_move_records_no_timing_event(
    kind: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(cuda, monkeypatch, NO_TRACE)
    if kind == "gather into staging":
        moves.connection.window.return_value = None
    job, _, copy = moves_of(kind)
    moves.run(job)
    assert cuda.log == [copy, *waits(kind)]


def test_a_slab_is_given_back_when_the_device_has_read_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(cuda, monkeypatch, NO_TRACE)
    told = moves.posted.put

    def put(outcome: object) -> None:
        cuda.log.append("told")
        told(outcome)

    moves.mover._post = put
    moves.run(moves_of("scatter")[0])
    assert cuda.log == ["read_slab", *waits("scatter"), "told"]


@pytest.mark.parametrize(("device", "kind"), [("cuda:1", DeviceClock), ("cpu", type(None))])
def test_a_workers_trace_has_its_devices_clock(
    device: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opening(Exception):
        pass

    def open_trace(folder: str, process: str, nvtx: object, clock: object) -> None:
        assert (folder, process) == ("traces", "w") and type(clock) is kind
        raise Opening

    monkeypatch.setattr(build, "open_trace", open_trace)
    facts = {"cpu_pinning": "off", "threads_per_rank": None, "trace_dir": "traces", "name": "w"}
    with pytest.raises(Opening):
        build.build_worker(SimpleNamespace(device=device, **facts), Mock())  # type: ignore[arg-type]
