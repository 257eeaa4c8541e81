"""A simulated pool node: the core of a real one, over a host's memory and disk. Pure.

A link is one connection of a worker. Each end ignores what comes over a link that is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from cluster.config.simulation import FabricSection
from cluster.core.settings import PoolNodeSettings
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.host import SimHost
from cluster.sim.machines.pool_disk import SimPoolDisk
from kvpool.core.blocks.eviction import open_policy
from kvpool.core.node.events import (
    DropRouter,
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolEvent,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    ReadSlots,
    RouterCall,
    RouterCalled,
    RouterTook,
    TellRouter,
    TellWorker,
    WriteSlots,
)
from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.messages import FromPool, PoolHello, PoolWelcome, ToPool
from kvpool.core.node.restored import restore
from kvpool.core.node.tier_blocks import TierBlocks
from kvpool.disk.slots import SLOT_HEADER_BYTES
from kvrelay.errors import ConfigError
from kvrelay.messages import PoolUpdate
from kvrelay.types import WIRE_VERSION, Incarnation
from router.core.events import PoolNodeLost, PoolNodeSaid

GONE = "the pool node is gone"
_CALLS_AGAIN_S = 1.0
"""After this time a router connects again whose stream has ended."""

RouterPost = Callable[[PoolNodeSaid | PoolNodeLost], None]


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Blocks of each tier."""

    host: int
    disk: int

    @classmethod
    def of(cls, settings: PoolNodeSettings, block_bytes: int) -> TierSizes:
        """Raises ConfigError."""
        assert settings.host_bytes is not None, "settled"
        host = settings.host_bytes // block_bytes
        disk = settings.disk_bytes // (block_bytes + SLOT_HEADER_BYTES)
        if not host:
            raise _too_small("host_memory", settings.host_bytes, block_bytes)
        if settings.disk is not None and not disk:
            raise _too_small("disk_size", settings.disk_bytes, block_bytes)
        return cls(host, 0 if settings.disk is None else disk)


def _too_small(key: str, nbytes: int, block_bytes: int) -> ConfigError:
    return ConfigError(f"pool.{key}: {nbytes} bytes, but one block takes {block_bytes}")


@dataclass(slots=True, eq=False)
class NodeLink:
    """A worker's connection to the node. `hear` and `lost` are the worker's end."""

    worker: Incarnation
    node: SimPoolNode
    hear: Callable[[NodeLink, FromPool], None]
    lost: Callable[[NodeLink], None]
    is_cut: bool = False


class SimPoolNode:
    """One life of a host's pool node."""

    def __init__(
        self,
        clock: Clock,
        host: SimHost,
        settings: PoolNodeSettings,
        fabric: FabricSection,
        *,
        incarnation: Incarnation,
        block_bytes: int,
    ) -> None:
        """The settings were checked by TierSizes."""
        self.incarnation = incarnation
        self.address = f"simulated:{incarnation}"
        self.region = f"{incarnation}-memory"
        self.host = host
        self.is_dead = False
        self._clock = clock
        self._latency_s = fabric.latency
        self._router_latency_s = fabric.router_latency
        self._lease_ttl_s = settings.lease_ttl_s
        self._ticking = False
        self._links: dict[Incarnation, NodeLink] = {}
        self._routers: list[RouterPost] = []
        self._disk = SimPoolDisk(clock, host, block_bytes, self._decide)
        host.memory.clear()
        sizes = TierSizes.of(settings, block_bytes)
        disk = TierBlocks(sizes.disk, open_policy(settings.policy))
        restore(disk, (slot.block for slot in host.disk.slots.values()))
        memory = TierBlocks(sizes.host, open_policy(settings.policy))
        self.core = HostTier(memory, disk, lease_ttl_s=settings.lease_ttl_s)

    def die(self) -> None:
        self.is_dead = True
        self._disk.die()
        for link in [*self._links.values()]:
            self._cut(link)
        for post in self._routers:
            self._clock.after(self._router_latency_s, post, self._lost)

    @property
    def _lost(self) -> PoolNodeLost:
        return PoolNodeLost(node=self.incarnation)

    # --- workers --------------------------------------------------------------------------------

    def send(self, link: NodeLink, message: ToPool) -> None:
        """From the worker."""
        self._clock.after(self._latency_s, self._hear, (link, message))

    def hang_up(self, link: NodeLink) -> None:
        """The worker is gone, or has closed the link."""
        link.is_cut = True
        self._clock.after(self._latency_s, self._left, link)

    def _hear(self, sent: tuple[NodeLink, ToPool]) -> None:
        link, message = sent
        if link.is_cut:
            return
        if self.is_dead:
            self._cut(link)
        elif isinstance(message, PoolHello):
            self._greeted(link, message)
        else:
            self._decide(FromPoolWorker(worker=link.worker, message=message))

    def _greeted(self, link: NodeLink, hello: PoolHello) -> None:
        before = self._links.get(link.worker)
        if before is not None:
            self._cut(before)
            self._left(before)
        self._links[link.worker] = link
        welcome = PoolWelcome(
            wire_version=WIRE_VERSION,
            incarnation=self.incarnation,
            region=self.region,
            lease_ttl_s=self._lease_ttl_s,
            addresses=(self.address,),
        )
        self._tell(link, welcome)
        self._decide(PoolWorkerJoined(worker=link.worker, looks_up=hello.looks_up))

    def _tell(self, link: NodeLink, message: FromPool) -> None:
        self._clock.after(self._latency_s, self._told, (link, message))

    @staticmethod
    def _told(sent: tuple[NodeLink, FromPool]) -> None:
        link, message = sent
        if not link.is_cut:
            link.hear(link, message)

    def _cut(self, link: NodeLink) -> None:
        link.is_cut = True
        self._clock.after(self._latency_s, link.lost, link)

    def _left(self, link: NodeLink) -> None:
        if self._links.get(link.worker) is link:
            del self._links[link.worker]
            self._decide(PoolWorkerLost(worker=link.worker))

    # --- routers --------------------------------------------------------------------------------

    def attach(self, post: RouterPost) -> None:
        self._routers.append(post)
        self._clock.after(self._router_latency_s, self._call, RouterCall(len(self._routers) - 1))

    def _call(self, call: RouterCall) -> None:
        self._decide(RouterCalled(router=call))

    def _update(self, command: TellRouter) -> None:
        update = PoolUpdate(
            sequence=command.sequence,
            node=self.incarnation,
            addresses=(self.address,),
            workers=command.workers,
            blocks=command.blocks,
        )
        self._clock.after(self._router_latency_s, self._updated, (command.router, update))

    def _updated(self, sent: tuple[RouterCall, PoolUpdate]) -> None:
        call, update = sent
        self._routers[call](PoolNodeSaid(update=update))
        self._decide(RouterTook(router=call))

    def _drop_router(self, call: RouterCall) -> None:
        post, self._routers[call] = self._routers[call], _ignore
        self._clock.after(self._router_latency_s, post, self._lost)
        self._clock.after(_CALLS_AGAIN_S, self.attach, post)

    # --- the core -------------------------------------------------------------------------------

    def _decide(self, event: PoolEvent) -> None:
        if self.is_dead:
            return
        for command in self.core.handle(event, self._clock.now_s):
            self._obey(command)
        if not self._ticking and not self.core.idle:
            self._ticking = True
            self._clock.after(self._lease_ttl_s / 3, self._tick)

    def _tick(self, _: None) -> None:
        """Only while there is something that could end by itself."""
        self._ticking = False
        self._decide(PoolTick())

    def _obey(self, command: PoolCommand) -> None:
        match command:
            case TellWorker(worker=worker, message=message):
                self._tell(self._links[worker], message)
            case TellRouter():
                self._update(command)
            case DropRouter(router=router):
                self._drop_router(router)
            case WriteSlots() | ReadSlots():
                self._disk.put(command)
            case DropWorker(worker=worker, reason=reason):
                raise AssertionError(f"{worker} broke the protocol: {reason}")
            case _:
                assert_never(command)

    def assert_nothing_held(self) -> None:
        self.core.validate()
        counts = self.core.books.counts()
        assert self.core.idle, counts
        assert not any(counts[state] for state in ("granted", "fenced", "loading")), counts


def _ignore(event: PoolNodeSaid | PoolNodeLost) -> None:
    """Of a stream that has ended."""
