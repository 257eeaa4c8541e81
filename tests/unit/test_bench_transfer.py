"""bench/transfer on a small shape: its figures are of transfers that arrive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import Reading
from bench.transfer.grid import GridPoint, grid_row
from bench.transfer.link import link
from bench.transfer.shape import Shape
from bench.transfer.speed import COLLATED, DIRECT, _rows, rows_of
from kvpool.link_cost import Way

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
    rows = [row for row in _rows("shm", speeds, Way.COLLATED, "") if row.goal == 0.9]
    (row,) = rows
    assert row.name == "shm: chosen: collated; direct is better"
    assert (row.value, row.against_value, row.reached) == (2.0, 4.0, False)


SPEEDS = {COLLATED: 2.0, DIRECT: 4.0, "one write": 8.0, "memcpy": 8.0}


@pytest.mark.parametrize(("direct_s", "right"), [(1.04, True), (1.06, False), (0.5, True)])
def test_a_choice_close_to_the_better_way_is_right(direct_s: float, right: bool) -> None:
    point = GridPoint(
        tokens=64,
        run_blocks=1,
        seconds={Way.COLLATED: 1.0, Way.DIRECT: direct_s},
        expected_s={Way.COLLATED: 2.0, Way.DIRECT: 1.0},
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
    row = grid_row("loopback", Shape(layers=1, tokens=256), repeats=1)
    assert 0 <= row.value <= 100 and row.method.startswith("8 transfers of up to 256 tokens")


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
