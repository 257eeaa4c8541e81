"""bench/transfer/timeline/overlap.py on traces made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.transfer.timeline.chrome import Range, ranges
from bench.transfer.timeline.overlap import Handoff, handoff, handoffs


def chunk(start_s: float, end_s: float, *requests: str) -> Range:
    args = {"requests": list(requests or ("r",))}
    return Range(name="prefill chunk", start_s=start_s, end_s=end_s, args=args)


def move(
    name: str, start_s: float, end_s: float, *, piece: int, end: int, request: str = "r"
) -> Range:
    args = {"request": request, "piece": piece, "end": end}
    return Range(name=name, start_s=start_s, end_s=end_s, args=args)


def commit(start_s: float, end_s: float, request: str = "r") -> Range:
    return Range(name="commit", start_s=start_s, end_s=end_s, args={"request": request})


def step(start_s: float, end_s: float) -> Range:
    return Range(name="decode step", start_s=start_s, end_s=end_s, args={"requests": ["other"]})


CHUNKS = [chunk(0, 10), chunk(11, 21)]
FIRST = [
    move("gather", 10.5, 13, piece=0, end=512),
    move("scatter", 12, 14, piece=0, end=512),
]
"""3.5 s in which the two overlap for one, 0.5 s of them between the chunks."""


def test_what_is_neither_hidden_nor_exposed_lies_between_the_chunks() -> None:
    found = handoff([*CHUNKS, *FIRST], "r")
    assert found == Handoff(
        transfer_s=3.5,
        hidden_s=3.0,
        exposed_s=0.0,
        commit_s=0.0,
        groups=1,
        left_groups=0.0,
        decode_steps=0,
    )
    assert found.hidden_share == pytest.approx(3.0 / 3.5)


def test_the_last_chunk_s_groups_are_counted_by_what_is_left_of_them() -> None:
    last = [
        move("gather", 17, 18, piece=1, end=1024),
        move("scatter", 18, 19, piece=1, end=1024),
        move("gather", 20, 21, piece=2, end=1024),
        move("scatter", 22, 23, piece=2, end=1024),
        move("gather", 21.5, 22.5, piece=3, end=1024),
        move("scatter", 23, 24, piece=3, end=1024),
    ]
    found = handoff([*CHUNKS, *FIRST, *last, commit(24.2, 24.5)], "r")
    assert found.groups == 3
    assert found.left_groups == pytest.approx(0.5 + 1.0)
    assert found.exposed_s == pytest.approx(2.5)
    assert found.commit_s == pytest.approx(3.5)
    assert found.transfer_s == pytest.approx(3.5 + 2 + 1 + 2.5)
    assert found.hidden_s == pytest.approx(3.0 + 2 + 1)


def test_the_commit_is_over_when_the_last_piece_is_there() -> None:
    late = move("scatter", 21, 30, piece=1, end=1024)
    assert handoff([*CHUNKS, commit(22, 23), late], "r").commit_s == pytest.approx(9.0)


def test_other_requests_are_left_out() -> None:
    others = [
        chunk(30, 60, "other"),
        move("gather", 30, 50, piece=0, end=4096, request="other"),
        commit(60, 61, "other"),
    ]
    alone = handoff([*CHUNKS, *FIRST, commit(21, 22)], "r")
    assert handoff([*others, *CHUNKS, *FIRST, commit(21, 22)], "r") == alone


def test_decode_steps_are_counted_from_the_first_chunk_to_the_commit() -> None:
    steps = [step(-2, -1), step(-0.5, 0.5), step(5, 6), step(21.5, 23), step(22.5, 24)]
    assert handoff([*CHUNKS, *FIRST, *steps, commit(22, 22.2)], "r").decode_steps == 3


def test_short_prompts_are_no_handoffs_to_look_at() -> None:
    short = [chunk(-5, -4, "short"), commit(-4, -3, "short")]
    later = [chunk(40, 41, "b", "c"), chunk(42, 43, "b"), commit(43, 44, "b")]
    found = handoffs([*later, *short, *CHUNKS, *FIRST, commit(21, 22)], chunks=2)
    assert [one.commit_s for one in found] == [1.0, 1.0]
    assert [one.transfer_s for one in found] == [3.5, 0.0]
    assert found[1].hidden_share == 0.0


PREFILL, DECODE = 1, 2


def on_device(of: Range, start_s: float, end_s: float, within_us: int = 20) -> Range:
    """The device's own range beside the host's."""
    args = {**of.args, "within_us": within_us}
    return replace(of, start_s=start_s, end_s=end_s, args=args, on_device=True)


def test_what_a_device_tells_counts_and_not_its_hosts_range() -> None:
    """Each process and kind of work by itself: here the decode worker has no device."""
    chunks = [replace(one, process=PREFILL) for one in CHUNKS]
    gather = replace(move("gather", 10.5, 13, piece=0, end=512), process=PREFILL)
    scatter = replace(move("scatter", 15, 15.5, piece=0, end=512), process=DECODE)
    told = [on_device(chunks[0], 2, 10), on_device(chunks[1], 12, 20, within_us=35)]
    gathered = on_device(gather, 12.5, 14)
    found = handoff([*chunks, gather, scatter, *told, gathered], "r")
    assert found.transfer_s == pytest.approx(1.5 + 0.5)
    assert found.hidden_s == pytest.approx(2.0), "the chunk began at 12, not at 11"
    assert found.within_us == 35
    assert handoff([*chunks, gather, scatter], "r").within_us is None
    (again,) = handoffs([*chunks, gather, scatter, *told, gathered], chunks=2)
    assert again == found
    assert handoffs([*chunks, *told], chunks=3) == [], "no chunk counts twice"


def test_a_write_waits_for_its_gather_which_alone_is_kv_on_its_way() -> None:
    """The device gathers from 15 to 17 in its turn; who writes has waited since 13."""
    gather = replace(move("gather", 12.8, 13, piece=0, end=512), process=PREFILL)
    write = replace(move("write", 13, 18, piece=0, end=512), process=PREFILL)
    next_gather = replace(move("gather", 13, 13.1, piece=1, end=512), process=PREFILL)
    gathered = [on_device(gather, 15, 17), on_device(next_gather, 19, 20)]
    found = handoff([*CHUNKS, gather, next_gather, write, *gathered], "r")
    assert found.transfer_s == pytest.approx(2 + 1 + 1)


def test_a_traces_ranges_say_whose_they_are() -> None:
    event = {"name": "gather", "ph": "X", "pid": 7, "tid": 1, "ts": 1e6, "dur": 2e6, "args": {}}
    host, device = ranges([event, {"name": "process_name", "ph": "M"}, {**event, "cat": "device"}])
    assert (host.process, host.on_device, device.on_device) == (7, False, True)
    assert (host.start_s, host.end_s) == (1.0, 3.0)
