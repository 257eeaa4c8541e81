"""Roles follow the work in the simulator: workers flip, and nothing is lost or left held."""

from __future__ import annotations

from bench.elastic.study import Cell, run


def cell(way: str) -> Cell:
    """Long prompts, and two of sixteen workers that prefill: far too few."""
    return Cell(load="swing", way=way, prefill=2, rate=13.0, seed=1, minutes=1.5, trace=None)


def test_a_bad_split_is_mended() -> None:
    stays, follows = run(cell("static")), run(cell("roles"))
    assert stays.flips == 0 and follows.flips >= 3
    assert follows.attainment > 1.3 * stays.attainment
