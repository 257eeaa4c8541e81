from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.scale import small


@pytest.fixture(autouse=True)
def small_scale() -> Iterator[None]:
    with small():
        yield
