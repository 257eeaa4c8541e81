"""Random schedules of clusters with a pool node per host: whatever the order of prefill, decode and
pool transfers, every request ends with its right tokens, no one waits for ever, no block of the
pool is ever taken for another, and nothing is left held in any tier."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from kvpool.core.blocks.eviction import policies
from kvpool.core.transfer.messages import HandoffMode
from kvpool.core.transfer.slabs import SlabState
from kvrelay.types import RequestKey, RequestSpec, Role, Sampling
from tests.sim.clients import Clients
from tests.sim.contents import GARBAGE
from tests.sim.model import GEMMA, MISTRAL, PLAIN, ROW_BYTES
from tests.sim.pool_node import Host
from tests.sim.seeds import seeds
from tests.sim.talks import LONGEST, draw_tokens, make_talks
from tests.sim.waits import who_waits
from tests.sim.worker import Shape

LAYOUTS = {"plain": PLAIN, "gemma": GEMMA, "mistral": MISTRAL}
ROLES = {
    "1p1d": (Role.PREFILL, Role.DECODE),
    "2p2d": (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE),
    "2p1d": (Role.PREFILL, Role.PREFILL, Role.DECODE),
    "2b": (Role.BOTH, Role.BOTH),
    "1p1d1b": (Role.PREFILL, Role.DECODE, Role.BOTH),
}


@dataclass(kw_only=True)
class World:
    """A cluster as the seed has it, with a node on each of `hosts` hosts."""

    seed: int
    roles: str = "1p1d"
    layout: str = "gemma"
    mode: HandoffMode = HandoffMode.PUSH
    hosts: int = 1
    requests: int = 30
    blocks: tuple[int, ...] = (14, 14, 20, 30)
    places: tuple[int, ...] = (2, 4, 8, 16, 40)
    disk_slots: tuple[int, ...] = (0, 6, 40, 40)
    slab_rows: tuple[int, ...] = (8, 64)
    staging: tuple[int, ...] = (1, 2, 3)
    slabs: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        self.clients = Clients(self.seed, 0, self.mode)
        self.cluster, self.rng = self.clients.cluster, self.clients.rng
        for i in range(self.hosts):
            self.cluster.pools.start_node(self._host(i))
        for i, role in enumerate(ROLES[self.roles]):
            self.cluster.start_worker(f"{role}-{i}", self._shape(role, i % self.hosts))
        for number, spec in enumerate(make_talks(self.rng, self.requests)):
            self.clients.add(spec, 0.1 + number * self.rng.choice([0.1, 0.4]))

    def _host(self, number: int) -> Host:
        return Host(
            name=f"h{number}",
            places=self.rng.choice(self.places),
            disk_slots=self.rng.choice(self.disk_slots),
            policy=self.rng.choice(policies()),
        )

    def _shape(self, role: Role, host: int) -> Shape:
        return Shape(
            role=role,
            blocks=self.rng.choice(self.blocks),
            slabs=self.rng.choice(self.slabs),
            slab_bytes=ROW_BYTES * self.rng.choice(self.slab_rows),
            layout=LAYOUTS[self.layout],
            mode=self.mode,
            max_model_len=LONGEST + 12,
            host=f"h{host}",
            staging_blocks=self.rng.choice(self.staging),
        )

    def carried(self) -> Counter[str]:
        """What the pools have done, those of dead workers left out."""
        found: Counter[str] = Counter()
        for worker in self.cluster.workers.values():
            pool = worker.core.lookup.pool
            assert pool is not None
            found.update(host_tokens=pool.own.host_tokens, disk_tokens=pool.own.disk_tokens)
            found.update(preemptions=worker.decode.batch.running_set.preemptions)
        for side in self.cluster.pools.sides.values():
            found.update(stored=side.counts.stored, damaged=side.counts.damaged)
        return found

    def storing_workers(self) -> int:
        """Workers whose pool thread stores blocks, or waits to."""
        return sum(not side.stores.idle for side in self.cluster.pools.sides.values())

    def run_in_peace(self) -> None:
        """To the end, without a tick in it that anyone needs: no one waits for time to pass."""
        self.cluster.run()
        assert not self.cluster.core.state.requests, who_waits(self.cluster)
        assert self.clients.finish() == {"done": len(self.clients.calls)}

    # --- what may go wrong ----------------------------------------------------------------------

    def disturb(self, moments: int) -> None:
        for i in range(moments):
            self.cluster.after(f"strike {i}", self.strike, self.rng.uniform(0.2, 4))

    def strike(self) -> None:
        cluster, rng = self.cluster, self.rng
        worker = rng.choice(sorted(cluster.workers)) if cluster.workers else None
        host = rng.choice(list(cluster.pools.hosts.values()))
        match rng.randrange(8):
            case 0 if worker is not None:
                cluster.kill(worker)
            case 1:
                self.kill_node(host)
            case 2:
                self.cut_pool(host)
            case 3:
                cluster.pools.damage_disk(host)
            case 4 if worker is not None:
                cluster.break_stream(worker)
            case 5:
                self.stray_write(host)
            case 6:
                self.stop_node(host)
            case 7 if worker is not None:
                self._stop(worker)

    def kill_node(self, host: Host) -> None:
        self.cluster.kill_pool_node(host)

    def cut_pool(self, host: Host) -> None:
        """From one of its workers."""
        sides = [s for s in self.cluster.pools.sides.values() if s.host == host.name]
        links = [side.link for side in sides if side.link is not None]
        if links:
            self.cluster.pools.cut(self.rng.choice(links))

    def stray_write(self, host: Host) -> None:
        """What a writer that was cut off may do, at its worst."""
        if host.node is not None:
            host.node.places[self.rng.randrange(host.places)] = GARBAGE

    def stop_node(self, host: Host) -> None:
        if host.node is not None:
            self._stop(host.node.incarnation)

    def _stop(self, process: str) -> None:
        """For less or for more than the leases."""
        self.cluster.stop(process)
        seconds = self.rng.choice([0.3, 8.0, 60.0])
        self.cluster.after(f"resume {process}", lambda: self.cluster.resume(process), seconds)

    def leave(self, share: float) -> None:
        for request_id in self.clients.calls:
            if self.rng.random() < share:
                delay_s = self.rng.uniform(0.1, 4)
                self.cluster.after(
                    f"leave {request_id}", lambda r=request_id: self.clients.abort(r), delay_s
                )

    def preload(self) -> None:
        """A prompt of its own for each worker, pinned."""
        for number, incarnation in enumerate(list(self.cluster.workers)):
            key = RequestKey(f"preload-{number}", 0)
            sampling = Sampling(max_tokens=1, seed=0)
            spec = RequestSpec(key=key, prompt_ids=draw_tokens(self.rng, 4, 9), sampling=sampling)
            self.cluster.preload(incarnation, spec)


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("roles", ["1p1d", "2p2d", "2b", "1p1d1b"])
@pytest.mark.parametrize("seed", range(2))
def test_undisturbed_every_request_is_done(seed: int, roles: str, mode: HandoffMode) -> None:
    layout = random.Random(f"{seed} {roles} {mode}").choice(list(LAYOUTS))
    world = World(seed=seed, roles=roles, layout=layout, mode=mode, hosts=1 + seed % 2)
    world.preload()
    world.run_in_peace()


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(4, long=12))
def test_deaths_silence_damage_and_broken_links(seed: int, mode: HandoffMode) -> None:
    """Of workers and nodes at any moment; some clients leave. None of it is stuck or held."""
    rng = random.Random(f"{seed} {mode}")
    roles, layout = rng.choice(list(ROLES)), rng.choice(list(LAYOUTS))
    world = World(seed=seed, roles=roles, layout=layout, mode=mode, hosts=1 + seed % 2)
    world.disturb(moments=12)
    world.leave(0.2)
    assert set(world.clients.finish()) <= {"done", "aborted"}


def test_requests_survive_the_pool() -> None:
    """A node's death, silence, damage and broken links to it cost time, not one request."""
    for seed in range(6):
        world = World(seed=seed, roles="1p1d1b", layout=list(LAYOUTS)[seed % 3])
        host = world.cluster.pools.hosts["h0"]
        for i, strike in enumerate(
            [world.kill_node, world.stray_write, world.cut_pool, world.stop_node] * 3
        ):
            world.cluster.after(f"strike {i}", lambda s=strike, h=host: s(h), 3.0)
        assert world.clients.finish() == {"done": world.requests}


def test_a_node_that_hangs_is_not_waited_for() -> None:
    for seed in range(3):
        world = World(seed=seed, roles="1p1d")
        (host,) = world.cluster.pools.hosts.values()
        assert host.node is not None
        name = host.node.incarnation
        world.cluster.after("hang", lambda w=world, n=name: w.cluster.stop(n), 2.0)
        world.cluster.run()
        world.cluster.settle()
        assert not world.cluster.core.state.requests, who_waits(world.cluster)
        world.cluster.resume(name)
        assert world.clients.finish() == {"done": world.requests}


def test_what_a_stray_writer_leaves_is_never_served() -> None:
    """Readers find it by its checksum, and compute the rest."""
    damaged = 0
    for seed in range(12):
        world = World(seed=seed, roles="2p2d", layout="plain", places=(16,))
        host = world.cluster.pools.hosts["h0"]
        for i in range(600):
            world.cluster.after(f"stray {i}", lambda w=world, h=host: w.stray_write(h), 4.0)
        world.run_in_peace()
        damaged += world.carried()["damaged"]
    assert damaged > 2


def test_prefixes_come_from_every_tier() -> None:
    carried: Counter[str] = Counter()
    for seed, mode in enumerate(HandoffMode):
        world = World(seed=seed, roles="2p2d", mode=mode, places=(8,), disk_slots=(40,))
        world.run_in_peace()
        carried += world.carried()
    assert carried["host_tokens"] > 20 and carried["disk_tokens"] > 20, carried
    assert carried["preemptions"] > 0, carried


@pytest.mark.parametrize(("roles", "mode"), [("1p1d", HandoffMode.POOL), ("2b", HandoffMode.PUSH)])
def test_workers_that_decode_fetch_from_other_hosts(roles: str, mode: HandoffMode) -> None:
    """From the pool nodes there, and from the workers."""
    nodes, peers = 0, 0
    for seed in range(3):
        world = World(seed=seed, roles=roles, mode=mode, hosts=2, places=(40,))
        world.run_in_peace()
        for worker in world.cluster.workers.values():
            lookup = worker.core.lookup
            if worker.shape.role is not Role.PREFILL:
                assert lookup.pool is not None and lookup.peers is not None
                nodes += lookup.pool.remote.tokens
                peers += lookup.peers.tokens
    assert nodes > (20 if mode is HandoffMode.POOL else 0), (nodes, peers)
    assert mode is HandoffMode.POOL or peers > 20, (nodes, peers)


@pytest.mark.parametrize("mode", HandoffMode)
def test_every_buffer_full_at_once(mode: HandoffMode) -> None:
    """LMCache#1215: chunks of several prompts fill the receiver's buffers; the sender waits for
    the receiver, the receiver for the router, the router for the sender, and no one moves."""
    tight = 0
    for seed in range(4):
        world = _narrow_world(seed, mode)
        while world.cluster.step():
            tight += _is_tight(world)
        world.run_in_peace()
    assert tight > 10


def _narrow_world(seed: int, mode: HandoffMode) -> World:
    """Prompts of four chunks each compete for one slab of a few rows, blocks for two of them that
    don't suffice for their answers, two host places and staging of one block."""
    world = World(
        seed=seed,
        roles="2p1d",
        mode=mode,
        requests=0,
        blocks=(24,),
        places=(2,),
        slabs=(1,),
        slab_rows=(8,),
        staging=(1,),
    )
    system = draw_tokens(world.rng, 8, 8)
    for number in range(12):
        spec = RequestSpec(
            key=RequestKey(f"r{number}", 0),
            prompt_ids=(*system, *draw_tokens(world.rng, LONGEST - 8, LONGEST - 8)),
            sampling=Sampling(max_tokens=12, seed=number),
        )
        world.clients.add(spec, 0.1)
    return world


def _is_tight(world: World) -> bool:
    """Both prompts are on their way, and no one has a buffer for the next chunk."""
    *prefill, decode = world.cluster.workers.values()
    reservations, tables = decode.decode.reservations, decode.tables
    has_slab = reservations.slabs.counts()[SlabState.FREE] and world.mode is not HandoffMode.POOL
    underway = all(w.prefill.queue or w.prefill.jobs.handing_over for w in prefill)
    return bool(
        underway and not has_slab and tables.free_blocks < 4 and world.storing_workers() > 0
    )
