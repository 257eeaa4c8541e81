"""The pool nodes of a simulated cluster, one on each host, in all their lives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.config.schema import Config
from cluster.config.simulation import HostSection
from cluster.core.plan import pool_node_settings
from cluster.core.resolve import worker_names
from cluster.core.settings import PoolNodeSettings
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.host import SimHost
from cluster.sim.machines.node_links import SimNodeLinks
from cluster.sim.machines.pool_node import RouterPost, SimPoolNode, TierSizes
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation


def settle_pool(config: Config) -> Config:
    """With the pool on or off: auto is on if its size is given, since simulated hosts have no
    memory of their own. Raises ConfigError for a pool without a size."""
    pool = config.pool
    if pool.enabled == "on" and pool.host_memory is None:
        raise ConfigError("pool.host_memory: got auto, expected the size of simulated pool nodes")
    if pool.enabled == "auto":
        is_on = pool.host_memory is not None
        pool = pool.model_copy(update={"enabled": "on" if is_on else "off"})
    return config.model_copy(update={"pool": pool})


def hosts_of(names: Sequence[Sequence[str]], section: HostSection) -> tuple[SimHost, ...]:
    """Workers fill the hosts in their order."""
    every = [name for pool in names for name in pool]
    firsts = range(0, len(every), section.workers)
    return tuple(
        SimHost(f"pool-{number}", frozenset(every[first : first + section.workers]), section)
        for number, first in enumerate(firsts)
    )


@dataclass(slots=True)
class SimPools:
    """`nodes` are all that there ever were."""

    clock: Clock
    config: Config
    block_bytes: int
    routers: Sequence[RouterPost]
    nodes: dict[Incarnation, SimPoolNode] = field(default_factory=dict)
    hosts: dict[str, SimHost] = field(init=False)
    _settings: PoolNodeSettings = field(init=False)
    _links: dict[str, list[SimNodeLinks]] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        self._settings = pool_node_settings(self.config)
        TierSizes.of(self._settings, self.block_bytes)
        hosts = hosts_of(worker_names(self.config.workers), self.config.simulation.host)
        self.hosts = {host.name: host for host in hosts}
        self._links = {host.name: [] for host in hosts}
        for host in hosts:
            self.start(host.name)

    def join(self, worker: str, links: SimNodeLinks) -> None:
        """A new life of this worker."""
        host = next(host for host in self.hosts.values() if worker in host.workers)
        self._links[host.name].append(links)
        links.live_on(host)

    def start(self, name: str) -> None:
        """The host's pool node, unless it runs."""
        host = self.hosts[name]
        if host.node is not None:
            return
        node = SimPoolNode(
            self.clock,
            host,
            self._settings,
            self.config.simulation.fabric,
            incarnation=self._next_incarnation(name),
            block_bytes=self.block_bytes,
        )
        self.nodes[node.incarnation] = node
        host.node = node.incarnation
        for router in self.routers:
            node.attach(router)
        for links in self._links[name]:
            links.look_for_own_node()

    def _next_incarnation(self, name: str) -> Incarnation:
        lives = sum(node.host.name == name for node in self.nodes.values())
        return Incarnation(f"{name}.{lives}" if lives else name)

    def kill(self, name: str) -> bool:
        """Whether there was one."""
        host = self.hosts[name]
        if host.node is None:
            return False
        self.nodes[host.node].die()
        host.node = None
        return True

    @property
    def living(self) -> list[SimPoolNode]:
        return [node for node in self.nodes.values() if not node.is_dead]
