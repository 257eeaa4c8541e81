"""Random schedules of whole clusters, with every fault at any moment: `tests/sim/fleet.py` says
what must hold. A failure names its seed, and the command that replays it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim import replays
from tests.sim.fleet import Fleet
from tests.sim.seeds import seeds

BATCH, BATCHES = 10, 9
LEAST_EVENTS = 3_000
"""Of one world, on average."""
FOLLOWS = (
    "copies that stalled",
    "hung processes killed by the controller",
    "local prefills",
    "moves",
    "newcomers placed while displaced requests wait",
    "preemptions",
    "processes started by the controller",
    "promises kept",
    "quarantined pairs",
    "refusals",
    "silent workers",
    "steps launched ahead",
    "streams that went on at a router",
    "suspected workers",
    "tokens from a disk",
    "tokens from a host's memory",
    "tokens pulled from peers",
    "workers that were empty when they left",
)
"""What must have come of it at least once."""


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("batch", seeds(BATCHES, long=65))
def test_every_fault_at_any_moment(batch: int, happened: Counter[str]) -> None:
    events = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        result = replays.run(seed)
        events += result.events
        happened += result.happened
    happened["batches"] += 1
    assert events > BATCH * LEAST_EVENTS, events


def test_every_fault_happened(happened: Counter[str]) -> None:
    if happened["batches"] < BATCHES:
        pytest.skip("only some of the batches have run")
    wanted = [*Fleet(0).faults.kinds, *FOLLOWS]
    assert not [name for name in wanted if not happened[name]], happened


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "run", lambda fleet: 1 // 0)
    with pytest.raises(AssertionError, match=r"seed 17: ZeroDivision.*\n.*soak --seed 17$"):
        replays.run(17)
