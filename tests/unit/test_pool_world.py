"""The pool's two cores together, over random schedules: nothing lost, nothing wrong served."""

from __future__ import annotations

import pytest

from kvpool.eviction import policies
from kvpool.pool.messages import PoolTier
from tests.unit.pool_world import World

_STEPS = 2500


def _check_at_rest(world: World) -> None:
    counts = world.node.books.counts()
    assert (counts["granted"], counts["fenced"], counts["loading"]) == (0, 0, 0), counts
    for worker in world.workers:
        assert worker.client.idle
        assert (worker.offers, worker.wants, worker.questions) == ({}, {}, 0)
        if worker.connected:
            assert len(worker.directory[PoolTier.HOST]) <= counts["cached"]


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(seed: int, policy: str) -> None:
    world = World(seed, policy=policy)
    for _ in range(_STEPS):
        world.step()
    world.drain()
    _check_at_rest(world)
    assert sum(worker.fetched for worker in world.workers) > 20, "the schedule does something"


def test_workers_hear_all_that_the_node_holds() -> None:
    world = World(1)
    for _ in range(_STEPS):
        world.step()
        if world.restored:
            break
    world.drain()
    for worker in world.workers:
        world.cut(worker)
        world.connect(worker)
    world.drain()
    first, *others = (worker.directory for worker in world.workers)
    assert all(other == first for other in others)
    for _ in range(300):
        world.offer(world.workers[0])
        world.deliver_to_node(world.workers[0])
        world.deliver_to_worker(world.workers[0])
        world.run_job(world.workers[0])
        world.run_disk(world.workers[0])
    world.drain()
    first, *others = (worker.directory for worker in world.workers)
    assert all(other == first for other in others)
    assert first[PoolTier.HOST]
    assert first[PoolTier.DISK]


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_restarts_takes_over_what_is_on_disk(seed: int) -> None:
    """Also an evicted block whose slot could not be written anew: its file is still there."""
    world = World(seed)
    for _ in range(_STEPS):
        world.step()
    world.drain()
    held = world.node.books.counts()["disk_cached"]
    world.restart_node(world.workers[0])
    assert 0 < held <= world.restored
    before = sum(worker.fetched for worker in world.workers)
    for worker in world.workers:
        world.connect(worker)
    for _ in range(20):
        world.want(world.workers[0])
        world.drain()
    assert sum(worker.fetched for worker in world.workers) > before
