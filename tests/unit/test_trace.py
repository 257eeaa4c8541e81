"""A worker's trace file: what Perfetto reads, and what profilers on CUDA are told."""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.process.trace import NO_TRACE, TraceFile, open_trace
from cluster.worker.device import TracedEngine
from engine.core.step import SequenceSlice, StepBatch, StepOutcome
from engine.device.layer_marks import LayerMarks
from engine.device.threads import nvtx
from engine.flight import Launched, ToldStep
from kvpool.core.blocks.tables import CopyPairs
from kvrelay.errors import ConfigError
from kvrelay.types import RequestKey


class Profiler:
    """In place of torch.cuda.nvtx."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def range_push(self, msg: str) -> None:
        self.told.append(f"push {msg}")

    def range_pop(self) -> None:
        self.told.append("pop")

    def mark(self, msg: str) -> None:
        self.told.append(f"mark {msg}")


def shown(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_ranges_have_their_thread_and_the_machine_s_clock(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json", "prefill-0")
    before_s = time.monotonic()
    with trace.span("outer", request="r"), trace.span("inner"):
        pass
    thread = threading.Thread(target=lambda: trace.took("apart", before_s), name="mover")
    thread.start()
    thread.join()
    trace.close()
    inner, outer, apart = shown(tmp_path / "t.json")
    assert [e["name"] for e in (inner, outer, apart)] == ["inner", "outer", "apart"]
    assert outer["args"] == {"request": "r"} and inner["args"] == {}
    assert outer["ts"] <= inner["ts"] and outer["dur"] >= inner["dur"] >= 0
    assert apart["ts"] == 1e6 * before_s <= outer["ts"]
    assert outer["tid"] == inner["tid"] != apart["tid"]
    assert {e["pid"] for e in (inner, outer, apart)} == {os.getpid()}


def test_processes_and_threads_are_named(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json", "prefill-0")
    trace.took("a", time.monotonic())
    trace.took("b", time.monotonic())
    trace.close()
    named = [e for e in json.loads((tmp_path / "t.json").read_text()) if e["ph"] == "M"]
    assert [(e["name"], e["args"]["name"]) for e in named] == [
        ("process_name", "prefill-0"),
        ("thread_name", threading.current_thread().name),
    ]
    assert named[1]["tid"] == threading.get_native_id()


def test_an_error_ends_its_range_and_goes_on(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json", "w")
    with pytest.raises(KeyError), trace.span("failing"):
        raise KeyError
    trace.close()
    trace.close()
    trace.took("too late", 0.0)
    assert [e["name"] for e in shown(tmp_path / "t.json")] == ["failing"]


def test_profilers_are_told_of_nested_ranges(tmp_path: Path) -> None:
    profiler = Profiler()
    trace = TraceFile(tmp_path / "t.json", "w", profiler)
    with trace.span("outer"):
        trace.took("part", time.monotonic())
        with pytest.raises(KeyError), trace.span("inner"):
            raise KeyError
    trace.close()
    assert profiler.told == ["push outer", "mark part", "push inner", "pop", "pop"]
    assert nvtx("cpu") is None and nvtx("cuda:1") is not None


def test_nothing_is_traced_unless_asked_for(tmp_path: Path) -> None:
    assert open_trace(None, "w", None, None) is NO_TRACE
    with NO_TRACE.span("a", request="r"):
        NO_TRACE.took("b", 0.0)
    with NO_TRACE.queued("c"), NO_TRACE.on_device("d"):
        pass
    NO_TRACE.close()


def test_each_process_has_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    open_trace(str(folder), "decode-1", None, None).close()
    (path,) = folder.iterdir()
    assert path.name == f"decode-1-{os.getpid()}.json"
    assert path.stat().st_mode & 0o777 == 0o600, "it names requests"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"observability\.trace_dir"):
        open_trace(str(tmp_path / "file" / "traces"), "w", None, None)


class Model:
    """An engine that writes layers 0 to 3."""

    def __init__(self) -> None:
        self.copied: list[CopyPairs] = []

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        return self.launch(batch, marks).collect()

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Launched | None = None
    ) -> Launched:
        for layer in range(4) if marks is not None else ():
            assert marks is not None
            marks.wrote(layer)
        return ToldStep(batch, lambda told: StepOutcome(sampled=((),)))

    def copy_blocks(self, pairs: CopyPairs) -> None:
        self.copied.append(pairs)


def part(request: str, start: int, tokens: int, prompt_tokens: int) -> SequenceSlice:
    return SequenceSlice(
        key=RequestKey(request_id=request, attempt=0),
        choice=0,
        token_ids=(1,) * tokens,
        start=start,
        tables=(),
        prompt_tokens=prompt_tokens,
    )


CHUNK = part("long", 64, 32, 100)
LAST_TOKEN = part("one", 99, 1, 100)
DECODING = part("short", 100, 1, 100)


@pytest.mark.parametrize(
    ("slices", "name", "requests"),
    [
        ((CHUNK,), "prefill chunk", ["long"]),
        ((LAST_TOKEN,), "prefill chunk", ["one"]),
        ((DECODING,), "decode step", ["short"]),
        ((DECODING, CHUNK, LAST_TOKEN), "prefill chunk", ["long", "one"]),
    ],
)
def test_a_step_is_named_for_what_it_computes(
    tmp_path: Path, slices: tuple[SequenceSlice, ...], name: str, requests: list[str]
) -> None:
    trace = TraceFile(tmp_path / "t.json", "w")
    model = Model()
    engine = TracedEngine(model, trace)
    assert engine.run(StepBatch(slices=slices)).sampled == ((),)
    engine.copy_blocks(((),))
    trace.close()
    (event,) = shown(tmp_path / "t.json")
    assert (event["name"], event["args"]["requests"]) == (name, requests)
    assert model.copied == [((),)]


def test_layer_groups_follow_one_another_within_their_chunk(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json", "w")
    told: list[int] = []
    TracedEngine(Model(), trace).run(
        StepBatch(slices=(CHUNK,)), LayerMarks(frozenset({0, 2}), told.append)
    )
    trace.close()
    assert told == [0, 2]
    *groups, chunk = shown(tmp_path / "t.json")
    assert [g["name"] for g in groups] == [
        f"layer group up to {where}" for where in ("layer 0", "layer 2", "the last layer")
    ]
    edges = [(g["ts"], g["ts"] + g["dur"]) for g in groups]
    assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(edges))
    assert chunk["ts"] <= edges[0][0] and edges[-1][1] <= chunk["ts"] + chunk["dur"] + 1e-3
