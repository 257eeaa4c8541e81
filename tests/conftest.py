"""One thread for tiny models; tests that need a CUDA device are skipped where there is none.

How fast hypothesis' examples are is no concern of a test: the machine may be busy.
"""

from __future__ import annotations

import tests.environment  # noqa: F401

# isort: split
import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.second_chance import FOLDERS

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


LONG = ("tests/unit/test_triton.py", "tests/unit/test_kernels_compiled.py")
"""Minutes long, and by name among the last: one process would run one while the others have no file
left."""


def pytest_collection_finish() -> None:
    """Modules stay: no collection of garbage looks through them again (1 s at a time)."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if item.nodeid.startswith(FOLDERS):
            item.add_marker(pytest.mark.processes)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
