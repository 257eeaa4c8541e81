"""torch's threads stay with the thread that computed; those of one that is over are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from engine.device.threads import run_apart, use_threads

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")


@pytest.fixture(autouse=True)
def _own_thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    use_threads(before)


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def compute_with_three() -> set[str]:
    """The threads that there are then."""
    use_threads(3)
    torch.ones(1 << 20).add_(1)
    return threads()


def test_what_ran_apart_leaves_no_threads() -> None:
    """The thread itself goes, and the two that helped it."""
    use_threads(3)  # what torch starts once for the whole process is there
    before = threads()
    new = run_apart(compute_with_three) - before
    deadline_s = time.monotonic() + 10
    while new & threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(new) >= 3 and not new & threads()


def test_a_thread_keeps_its_count_whatever_another_sets_next() -> None:
    def first() -> int:
        use_threads(3)
        run_apart(lambda: use_threads(1))
        return torch.get_num_threads()

    assert run_apart(first) == 3


def test_what_fails_apart_fails_here() -> None:
    with pytest.raises(SystemExit, match="no model"):
        run_apart(lambda: (_ for _ in ()).throw(SystemExit("no model")))
