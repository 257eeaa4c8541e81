"""bench/transfer on a small shape: its figures are of transfers that arrive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import bench.transfer.sender
from bench.report import Reading
from bench.transfer.grid import GridPoint, grid_rows, measure
from bench.transfer.link import link
from bench.transfer.pair import PAIRS
from bench.transfer.shape import Shape
from bench.transfer.speed import COLLATED, DIRECT, _rows, rows_of
from bench.transfer.timeline.overlap import Handoff
from bench.transfer.timeline.profile import rows_of as profiled
from kvpool.core.transfer.link_cost import Sample, TransferWay
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.probe import measure_copies

REPOSITORY = Path(__file__).parents[2]
SMALL = Shape(layers=2, tokens=1100)


@pytest.mark.parametrize("scheme", ["loopback", "shm", "nixl"])
def test_every_way_moves_the_bytes(scheme: str) -> None:
    rows = rows_of(scheme, SMALL, repeats=2)
    assert all(row.name.startswith(f"{scheme}: ") and row.value > 0 for row in rows)
    assert [row.goal for row in rows if row.goal] == ([2, 0.6] if scheme == "nixl" else [0.9, 0.6])


def test_a_transfer_that_damages_bytes_is_noticed() -> None:
    with link("loopback", SMALL) as sender:
        sender.check(sender.collated)
        with pytest.raises(AssertionError, match="other bytes arrived"):
            sender.check(sender.one_write)  # lies in other blocks


def test_the_chosen_way_is_measured_against_the_better_one() -> None:
    speeds = {name: Reading(values=(speed,)) for name, speed in SPEEDS.items()}
    rows = [row for row in _rows("shm", speeds, TransferWay.COLLATED, "") if row.goal == 0.9]
    (row,) = rows
    assert row.name == "shm: chosen: collated; direct is better"
    assert (row.value, row.against_value, row.reached) == (2.0, 4.0, False)


SPEEDS = {COLLATED: 2.0, DIRECT: 4.0, "one write": 8.0, "memcpy": 8.0}


@pytest.mark.parametrize(("direct_s", "right"), [(1.04, True), (1.06, False), (0.5, True)])
def test_a_choice_close_to_the_better_way_is_right(direct_s: float, right: bool) -> None:
    point = GridPoint(
        tokens=64,
        run_blocks=1,
        taken_s={TransferWay.COLLATED: [0.1, 1.0, 3.0], TransferWay.DIRECT: [9.0, 2.0, direct_s]},
        chosen=TransferWay.DIRECT,
    )
    assert point.right is right


def test_the_grid_lays_the_sequence_out_at_both_ends() -> None:
    with link("loopback", SMALL) as sender:
        shapes = []
        for run_blocks in (1, 4, SMALL.blocks):
            sender.lay_out(run_blocks)
            sender.check(lambda: sender.direct_pieces(SMALL.tokens))
            shapes.append(sender.pieces(SMALL.tokens))
    assert all(sum(piece.nbytes for piece in pieces) == SMALL.nbytes for pieces in shapes)
    runs = [sum(piece.source_runs for piece in pieces) for pieces in shapes]
    assert runs[0] > runs[1] > runs[2]
    assert shapes[0][0].descriptors > shapes[2][0].descriptors
    right, _ = grid_rows("loopback", Shape(layers=1, tokens=256), repeats=1)
    assert right.method.startswith("8 transfers of up to 256 tokens")


def test_no_transfer_of_the_grid_follows_one_of_the_same_blocks() -> None:
    moved: list[tuple[str, int, int]] = []
    points = [GridPoint(tokens=t, run_blocks=r) for r in (1, 4) for t in (64, 256)]
    with link("loopback", Shape(layers=1, tokens=256)) as sender:
        collated, direct = sender.collated, sender.direct_pieces

        def note(way: str, move: Callable[[int], float], tokens: int) -> float:
            moved.append((way, sender.shape.run_blocks, tokens))
            return move(tokens)

        sender.collated = lambda tokens: note(TransferWay.COLLATED, collated, tokens)  # type: ignore[method-assign]
        sender.direct_pieces = lambda tokens: note(TransferWay.DIRECT, direct, tokens)  # type: ignore[method-assign]
        measure(sender, points, repeats=2)
    assert len(moved) == 3 * 2 * len(points) and len(set(moved)) == 2 * len(points)
    assert all(one[1:] != other[1:] for one, other in pairwise(moved))
    assert all(len(point.taken_s[way]) == 3 for point in points for way in TransferWay)


def test_copies_are_measured_in_a_pool_that_holds_no_more_than_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[KvMemory] = []

    def measured(pool: KvMemory, slab_bytes: int) -> dict[str, tuple[Sample, ...]]:
        pools.append(pool)
        return measure_copies(pool, slab_bytes)

    monkeypatch.setattr(bench.transfer.sender, "measure_copies", measured)
    with link("loopback", Shape(layers=32, tokens=16)) as sender:
        assert sender.cost()
    (pool,) = pools
    assert pool.map.nbytes == 64 * 2**20


@pytest.mark.processes
def test_the_command_prints_json() -> None:
    small = ["--layers=1", "--tokens=64", "--only", "loopback", "--steady=20", "--format=json"]
    run = subprocess.run(
        [sys.executable, "-m", "bench.transfer", *small],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    (row,) = json.loads(run.stdout)
    assert row["name"] == "loopback: memory grown in 20 transfers"
    assert row["unit"] == "MiB"


def test_kv_on_a_device_goes_in_whole_chunks_and_both_passes_count() -> None:
    shape = Shape(layers=32, tokens=1100, device="cuda")
    assert shape.staging.payload_bytes == 512 * shape.layout.bytes_per_token
    assert len(shape.cut()) == 3 < len(replace(shape, device="cpu").cut())
    speeds = {name: Reading(values=(speed,)) for name, speed in SPEEDS.items()}
    (row,) = [r for r in _rows("cuda_ipc", speeds, TransferWay.DIRECT, "") if r.goal == 0.8]
    assert (row.value, row.against, row.against_value) == (4.0, "memcpy", 8.0)
    assert row.reached is False


def test_two_workers_share_the_device() -> None:
    pair = PAIRS["cuda"]
    assert [(p.role, p.device) for p in pair.plans] == [("prefill", "cuda"), ("decode", "cuda")]
    assert not {*pair.plans[0].cores} & {*pair.plans[1].cores}
    planes = Shape(layers=32, tokens=1).layout.groups[0].planes
    config = pair.model
    assert (config.num_key_value_heads, config.head_dim) == (planes[0].heads, planes[0].dim)
    assert config.num_hidden_layers == 32 and pair.max_model_len <= config.max_position_embeddings


def test_what_is_exposed_on_a_device_has_its_limit() -> None:
    found = Handoff(
        transfer_s=0.02,
        hidden_s=0.016,
        exposed_s=0.002,
        commit_s=0.004,
        groups=4,
        left_groups=1.2,
        decode_steps=9,
    )
    rows = {row.name: row for row in profiled(PAIRS["cuda"], "cuda_ipc", [found])}
    limited = rows["cuda_ipc: from the last chunk's compute until committed"]
    assert (limited.value, limited.against_value, limited.reached) == (4.0, 3.0, False)
    assert rows["cuda_ipc: of that behind the prompt's compute"].value == pytest.approx(80)
    assert rows["cuda_ipc: layer groups left then, of 4"].reached
    assert limited.method.endswith("traces, by the host's clock")
    told = [found, replace(found, within_us=25), replace(found, within_us=40)]
    (row, *_) = profiled(PAIRS["cuda"], "cuda_ipc", told)
    assert row.method.endswith("traces, by the device's events, within 40 us of the host's clock")
    on_cpu = profiled(PAIRS["cpu"], "shm", [found])
    assert [row.reached for row in on_cpu if row.unit == "ms"] == [None, None, None]


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_without_a_device_nothing_is_measured_on_it() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.transfer", "--device", "cuda"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "cuda_ipc: not measured: transport 'cuda_ipc' needs a CUDA device" in run.stderr
    assert run.stderr.endswith("KV on cuda can't be moved here\n")
