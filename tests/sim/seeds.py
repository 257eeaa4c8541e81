"""Seeds of random schedules: the first of them in `make test`, all others in `make test-long`."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def seeds(count: int, *, long: int) -> list[ParameterSet]:
    """`count` seeds that always run, and so many more that take long."""
    always = [pytest.param(seed) for seed in range(count)]
    more = (pytest.param(count + i, marks=pytest.mark.long) for i in range(long))
    return [*always, *more]
