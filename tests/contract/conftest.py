"""Every contract test that asks for a side runs over every transport of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvpool.transport.registry import schemes
from tests.contract.transport_kit import (
    MakeSide,
    Side,
    held,
    load,
    no_more_than,
    parameters,
    until,
)
from tests.forks import start_server


@pytest.fixture(params=parameters())
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def loaded() -> None:
    """What a library opens when it is loaded is there before anything is counted, and the process
    that others are forked from."""
    start_server()
    for scheme in schemes():
        if scheme != "cuda_ipc" or torch.cuda.is_available():
            load(scheme)


@pytest.fixture
def make_side(scheme: str) -> Iterator[MakeSide]:
    """Sides that close at the end; then no threads, descriptors or mappings may be left of them."""
    before, sides = held(), []

    def make(**options: Any) -> Side:
        sides.append(Side(scheme, **options))
        return sides[-1]

    yield make
    for side in sides:
        side.__exit__()
    sides.clear()
    until(lambda: no_more_than(before))
