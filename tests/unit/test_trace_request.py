"""One request enters no more files, and makes no more calls, than it did."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict

import pytest

from bench.router.trace_request import (
    Calls,
    Counts,
    calls_per_token,
    counts,
    hard_request,
    plain_request,
)

COUNTED_BY = (3, 11)
"""Other versions of Python make other calls, for example none for what they inline."""
SLACK = 1.02
BUDGET: dict[Callable[[], Calls], Counts] = {
    plain_request: Counts(files=83, calls=2341, across=1308),
    hard_request: Counts(files=83, calls=8450, across=4423),
}
CALLS_PER_TOKEN = 130.8

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != COUNTED_BY, reason="the budget was counted with another Python"
)


def check(name: str, found: float, budget: float) -> None:
    assert found <= budget, (
        f"{name}: {found:g}, the budget is {budget:g}. `python -m bench.router.trace_request "
        "--path` shows the way; shorten it, or say in the commit why a longer one is worth it"
    )
    assert budget <= SLACK * found + 1, f"{name}: {found:g}, so lower the budget of {budget:g}"


@pytest.mark.parametrize("request_of", BUDGET)
def test_a_request_keeps_its_budget(request_of: Callable[[], Calls]) -> None:
    found, budget = asdict(counts(request_of())), asdict(BUDGET[request_of])
    for name, value in found.items():
        check(name, value, budget[name])


def test_a_further_token_keeps_its_budget() -> None:
    check("calls per further token", calls_per_token(), CALLS_PER_TOKEN)


def test_equal_requests_make_equal_calls() -> None:
    assert counts(plain_request()) == counts(plain_request())
