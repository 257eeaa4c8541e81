"""A whole cluster on a virtual clock: the cluster file's pools, routers, and a trace's clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from cluster.config.schema import Config
from cluster.config.simulation import SimulatedPool, Simulation
from cluster.config.workers import role_at
from cluster.core.desired import pool_of, process_name
from cluster.core.elastic.controller import ElasticPolicy, new_controller
from cluster.core.elastic.fleet import Counts
from cluster.core.elastic.of_file import elastic_rules
from cluster.core.plan import router_settings, worker_settings
from cluster.core.resolve import Site, resolve, worker_names
from cluster.sim.changes import Failures, check_failures
from cluster.sim.elastic import Flip, Life, SimElastic
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.links import Fabric, Post
from cluster.sim.machines.noise import DrawnNoise, ReplayedNoise, StepNoise
from cluster.sim.machines.recorded import read_recorded
from cluster.sim.pools import SimPools, hosts_of, settle_pool
from cluster.sim.profiles.load import HardwareProfile, read_profile, told_times
from cluster.sim.router import Clients, SimRouter
from cluster.sim.timeline import LOOKS, Timeline, TimelinePoint
from cluster.sim.trace import Answers, Outcome, TraceRequest, arrivals
from cluster.sim.worker import Hardware, SimWorker, Surroundings
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation, Role
from router.core.core import RouterCore
from router.core.load.needs import model_of
from router.core.start import Beginning, begin

NOWHERE = Site(total_cpus=0, node_cpus=1, host="simulated", bundled_path="simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Of a trace: its rate, and how often each request comes."""

    rate: float = 1.0
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimFleet:
    """# worker |-> its hardware profile"""

    workers: dict[Incarnation, SimWorker]
    profiles: dict[Incarnation, HardwareProfile]

    def of(self, name: str) -> list[SimWorker]:
        """All that had this name, one after another."""
        return [worker for worker in self.workers.values() if worker.name == name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What happened, to be reported."""

    config: Config
    scale: Scale
    outcomes: Sequence[Outcome]
    fleet: SimFleet
    timeline: Sequence[TimelinePoint]
    ended_s: float
    events: int
    moved_bytes: int
    level_changes: int
    ahead_tokens: int
    flips: Sequence[Flip]
    lives: Sequence[Life]
    pools: SimPools | None


class ClusterSimulation:
    """Every core is that of production; only what takes time differs."""

    def __init__(self, config: Config, requests: Sequence[TraceRequest], scale: Scale) -> None:
        """Raises ConfigError."""
        config = settle_pool(config)
        check(config)
        self.config = resolve(config, NOWHERE)
        self._scale = scale
        simulation = config.simulation
        self.clock = Clock()
        timed = arrivals(
            requests,
            rate_scale=scale.rate,
            replicas=scale.replicas,
            draw=Random(simulation.seed).random,
        )
        answers = Answers(timed, simulation.max_tokens)
        self._fabric = Fabric(simulation.fabric)
        self._noises = count()
        self._posts: dict[Incarnation, Post] = {}
        self.routers = [self._router(n) for n in range(self.config.router.replicas)]
        self.pools = self._pools() if self.config.pool.enabled == "on" else None
        self._around = Surroundings(
            clock=self.clock,
            fabric=self._fabric,
            answers=answers,
            posts=self._posts,
            nodes=self.pools.nodes if self.pools is not None else {},
        )
        self.fleet = self._fleet()
        draw = Random(simulation.seed).random
        block_size = simulation.block_size or self.config.engine.block_size
        self.clients = Clients(
            self.routers, self.clock, timed, answers, simulation, draw, block_size
        )
        for router in self.routers:
            router.serve(self.clients)
        span_s = timed[-1].request.arrival_s or 1.0
        self._timeline = Timeline(
            self.clock, self.fleet.workers.values(), span_s / LOOKS, self.clients.is_waiting
        )
        self.failures = self._failures()
        self.elastic = self._elastic()

    def _router(self, number: int) -> SimRouter:
        simulation = self.config.simulation
        core = begin(_beginning(self.config, number))
        return SimRouter(core, self.clock, simulation.fabric.router_latency, simulation.service)

    def _pools(self) -> SimPools:
        config = self.config
        block_bytes = kv_layout(config.simulation, config.engine.block_size).bytes_per_block
        return SimPools(self.clock, config, block_bytes, [router.hear for router in self.routers])

    def _fleet(self) -> SimFleet:
        workers: dict[Incarnation, SimWorker] = {}
        profiles: dict[Incarnation, HardwareProfile] = {}
        names = worker_names(self.config.workers)
        for index, pool in enumerate(self.config.workers):
            profile, hardware = self._hardware(index)
            for number, name in enumerate(names[index]):
                settings = worker_settings(self.config, pool, name)
                settings = settings.with_role(role_at(pool.role, number))
                worker = SimWorker(settings, hardware, self._around)
                workers[worker.incarnation] = worker
                profiles[worker.incarnation] = profile
                self._connect(worker)
        return SimFleet(workers=workers, profiles=profiles)

    def _connect(self, worker: SimWorker) -> None:
        self._posts[worker.incarnation] = worker.hear
        for router in self.routers:
            router.attach(worker)
        if self.pools is not None and worker.node_links is not None:
            self.pools.join(worker.name, worker.node_links)

    def _failures(self) -> Failures:
        return Failures(
            clock=self.clock,
            routers=self.routers,
            workers=self.fleet.workers,
            peer_latency_s=self.config.simulation.fabric.latency,
            again=self._again,
            pools=self.pools,
        )

    def _elastic(self) -> SimElastic:
        return SimElastic(
            clock=self.clock,
            policy=self._policy(),
            routers=self.routers,
            workers=self.fleet.workers,
            may_change=self._followed,
            start=self._one_more,
            start_s=self.config.simulation.start_up,
            end=self.failures.end,
            goes_on=self.clients.is_waiting,
        )

    def _policy(self) -> ElasticPolicy | None:
        """As the cluster file says."""
        rules = elastic_rules(self.config.workers, self.config.elastic)
        if rules is None:
            return None
        workers = self.fleet.workers.values()
        followed = [one for one in workers if rules.is_followed_by(pool_of(one.name))]
        fixed = [one.core.role for one in workers if one not in followed]
        controller = new_controller(rules, model_of(followed[0].hello))
        controller.keep(rules, Counts(fixed.count(Role.PREFILL), fixed.count(Role.DECODE)))
        return controller

    def _followed(self) -> list[SimWorker]:
        """Those of pools whose workers take either role, or whose number changes; if there are
        none, and a policy nonetheless: all."""
        rules = elastic_rules(self.config.workers, self.config.elastic)
        workers = self.fleet.workers.values()
        if rules is None:
            return [*workers]
        return [one for one in workers if rules.is_followed_by(pool_of(one.name))]

    def _one_more(self, role: Role) -> SimWorker:
        """As the first one that followed the work with this role, or of either."""
        there = self._followed()
        first = next((one for one in there if one.settings.role is role), there[0])
        pool, names = pool_of(first.name), {worker.name for worker in there}
        name = next(name for n in count() if (name := process_name(pool, n)) not in names)
        settings = replace(first.settings.with_role(role), name=name)
        worker = SimWorker(settings, first.hardware, self._around)
        self._take(worker, self.fleet.profiles[first.incarnation])
        return worker

    def _take(self, worker: SimWorker, profile: HardwareProfile) -> None:
        self.fleet.workers[worker.incarnation] = worker
        self.fleet.profiles[worker.incarnation] = profile
        self._connect(worker)

    def _again(self, name: str, life: int) -> SimWorker:
        first = self.fleet.workers[Incarnation(name)]
        worker = SimWorker(first.settings, first.hardware, self._around, life)
        self._take(worker, self.fleet.profiles[first.incarnation])
        return worker

    def _hardware(self, index: int) -> tuple[HardwareProfile, Hardware]:
        simulation, scheduler = self.config.simulation, self.config.scheduler
        pools = simulation.pools
        own = pools[index] if index < len(pools) else SimulatedPool()
        key = "simulation.profile" if own.profile is None else f"simulation.pools.{index}.profile"
        profile = read_profile(own.profile or simulation.profile, key)
        layout = kv_layout(simulation, self.config.engine.block_size)
        blocks = own.blocks or simulation.blocks
        max_model_len = self.config.model.max_model_len or simulation.max_model_len
        told = told_times(
            profile.times,
            chunk_tokens=scheduler.chunk_tokens(on_gpu=self.config.workers[index].on_gpu),
            most_sequences=scheduler.max_running_requests,
            max_model_len=max_model_len,
            tokens=blocks * layout.block_size,
        )
        stages = max(profile.stages, self.config.workers[index].parallel.pipeline)
        return profile, Hardware(
            times=profile.times,
            told=told,
            layout=layout,
            blocks=blocks,
            max_model_len=max_model_len,
            most_steps=simulation.most_steps,
            noise=self._noise() if simulation.noise.is_any else None,
            turn_s=simulation.service.worker_turn,
            job_s=simulation.service.mover_job,
            stages=stages,
        )

    def _noise(self) -> Callable[[], StepNoise]:
        """Each worker, and each of its lives, has a generator of its own."""
        noise, seed = self.config.simulation.noise, self.config.simulation.seed
        recorded = None if noise.recorded is None else read_recorded(Path(noise.recorded))

        def one() -> StepNoise:
            rng = Random(f"{seed}-{next(self._noises)}")
            if recorded is not None:
                return ReplayedNoise(recorded=recorded, uniform=rng.random)
            gauss, correlation_s = partial(rng.gauss, 0.0, 1.0), noise.correlation or 0.0
            return DrawnNoise(sigma=noise.sigma, correlation_s=correlation_s, gauss=gauss)

        return one

    def run(self) -> Simulated:
        """Until every request has ended and nothing is held."""
        self.failures.begin(self.config.simulation.failures)
        self.clients.begin()
        self._timeline.begin()
        self.elastic.begin()
        events = self.clock.run()
        self._check_end()
        return Simulated(
            config=self.config,
            scale=self._scale,
            outcomes=self.clients.outcomes,
            fleet=self.fleet,
            timeline=self._timeline.looks,
            ended_s=self.clock.now_s,
            events=events,
            moved_bytes=self._fabric.moved_bytes,
            ahead_tokens=self.clients.parts.computed_tokens,
            flips=self.elastic.flips,
            lives=self.elastic.lives,
            level_changes=sum(router.level_changes for router in self.routers),
            pools=self.pools,
        )

    def _check_end(self) -> None:
        """The conservation laws."""
        for worker in self.fleet.workers.values():
            if not worker.is_dead:
                worker.assert_nothing_held()
        for node in self.pools.living if self.pools is not None else ():
            node.assert_nothing_held()
        for router in self.routers:
            _assert_empty(router.core)


def _assert_empty(core: RouterCore) -> None:
    core.validate()
    assert not core.state.requests, f"{len(core.state.requests)} requests never ended"
    for view in core.state.workers.values():
        assert not view.outlook.sequences and not len(view.queue), view.incarnation


def _beginning(config: Config, number: int) -> Beginning:
    settings = router_settings(config)
    return Beginning(
        seed=config.simulation.seed + number,
        policies=settings.policies,
        tiers=settings.qos,
        directory_bytes=settings.directory_bytes,
        failover_patience_s=settings.failover_patience_s,
    )


def check(config: Config) -> None:
    """Raises ConfigError for what can't be simulated. The pool of `config` is settled."""
    simulation = config.simulation
    if len(simulation.pools) > len(config.workers):
        raise ConfigError(
            f"simulation.pools: got {len(simulation.pools)}, but workers has {len(config.workers)}"
        )
    names = worker_names(config.workers)
    hosts = hosts_of(names, simulation.host) if config.pool.enabled == "on" else ()
    check_failures(simulation.failures, names, [host.name for host in hosts])
    if 512 % (simulation.block_size or config.engine.block_size):
        raise ConfigError(
            f"engine.block_size: got {config.engine.block_size}, expected a divisor of 512"
        )


def kv_layout(simulation: Simulation, block_size: int) -> KvLayout:
    kv = simulation.kv
    planes = tuple(Plane(name=name, heads=kv.heads, dim=kv.head_dim) for name in ("k", "v"))
    return KvLayout(
        groups=(LayerGroup(layers=tuple(range(kv.layers)), planes=planes),),
        dtype=kv.dtype,
        block_size=simulation.block_size or block_size,
    )
