"""How streams' kernels share a device, from a trace of a profiler. No device is asked."""

from __future__ import annotations

import pytest

from bench.engine.cuda.kernel_times import stream_times


def kernel(stream: int, begin: float, end: float) -> dict[str, object]:
    return {"cat": "kernel", "ts": begin, "dur": end - begin, "args": {"stream": stream}}


def test_shares_of_the_whole_time() -> None:
    events = [
        kernel(7, 0, 40),
        kernel(7, 30, 50),  # of one stream: not at once
        kernel(9, 45, 65),
        kernel(9, 90, 100),
        {"cat": "cuda_runtime", "ts": -50.0, "dur": 999.0},
        {"ph": "M", "name": "process_name"},
    ]
    found = stream_times(events)
    assert found.busy == pytest.approx({7: 0.5, 9: 0.3})
    assert found.at_once == pytest.approx(0.05)
    assert found.idle_s == pytest.approx(25e-6)
    assert str(found) == "kernels ran: stream 7 50 %, stream 9 30 %, of two streams at once 5 %"


def test_without_kernels_there_are_no_shares() -> None:
    assert stream_times([{"cat": "cpu_op", "ts": 0, "dur": 1}]).busy == {}
