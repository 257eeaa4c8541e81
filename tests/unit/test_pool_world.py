"""The pool's two cores together, over random schedules: nothing lost, nothing wrong served."""

from __future__ import annotations

import pytest

from kvpool.core.blocks.eviction import policies
from kvpool.core.node import changes
from tests.sim.seeds import seeds
from tests.unit.directory_kit import known
from tests.unit.pool_world import World

_STEPS = 2500


def _check_at_rest(world: World) -> None:
    counts = world.node.books.counts()
    assert (counts["granted"], counts["fenced"], counts["loading"]) == (0, 0, 0), counts
    assert world.node.idle
    for worker in world.workers:
        assert worker.pool.nodes.stores.idle and not worker.pool.nodes.stores.is_mute
        assert (worker.offers, worker.wants) == ({}, {}) and not list(worker.tables.held())
    _check_routers(world)


def _check_routers(world: World) -> None:
    """Who has called knows exactly what the node holds, and for whom."""
    connected = {worker.name for worker in world.workers if worker.connected}
    for router in world.routers:
        nodes = router.directory.pool_nodes
        if router.call is None:
            assert not nodes and not router.directory.blocks
        else:
            assert nodes.keys() == {world.incarnation}
            assert {*nodes[world.incarnation].workers} == connected
            held = known(router.directory).get(world.incarnation, {})
            assert {tier: held.get(tier, set()) for tier in world.held()} == world.held()


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("seed", seeds(6, long=6))
def test_random_schedules(seed: int, policy: str) -> None:
    world = World(seed, policy=policy)
    for _ in range(_STEPS):
        world.step()
    world.drain()
    _check_at_rest(world)
    assert sum(worker.fetched for worker in world.workers) > 15, "the schedule does something"


@pytest.mark.parametrize("seed", seeds(6, long=6))
def test_routers_know_what_the_node_holds_however_slowly_they_read(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of two blocks; a router is dropped if more strands wait than when it called."""
    monkeypatch.setattr(changes, "PAGE_BLOCKS", 2)
    monkeypatch.setattr(changes, "MOST_WAITING", 0)
    world, was_full = World(seed), False
    for step in range(_STEPS):
        world.step()
        if step % 100 == 99:
            world.drain()
            _check_routers(world)
            was_full |= all(world.held().values()) and all(r.call for r in world.routers)
    assert was_full
    assert sum(router.drops for router in world.routers) > 0, "some read too slowly"


@pytest.mark.parametrize("seed", seeds(2, long=2))
def test_a_node_that_restarts_takes_over_what_is_on_disk(seed: int) -> None:
    """Also an evicted block whose slot could not be written anew: its file is still there."""
    world = World(seed)
    for _ in range(_STEPS):
        world.step()
    world.drain()
    held = world.node.books.counts()["disk_cached"]
    world.mend_disk()
    world.restart_node(world.workers[0])
    assert 0 < held <= world.restored
    before = sum(worker.fetched for worker in world.workers)
    for worker in world.workers:
        world.connect(worker)
    for _ in range(20):
        world.want(world.workers[0])
        world.drain()
    assert sum(worker.fetched for worker in world.workers) > before
