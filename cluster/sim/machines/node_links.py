"""What a simulated worker has in place of links to pool nodes and of the thread of each. Pure.

A thread does one job at a time, fetches first. Blocks go through the memory of the worker's own
host, or come over the network from another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from cluster.core.worker.events import CoreEvent
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.host import SimHost
from cluster.sim.machines.links import Fabric
from cluster.sim.machines.pool_node import GONE, NodeLink, SimPoolNode
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    BlocksFetched,
    BlocksStored,
    CloseNode,
    ConnectNode,
    FetchBlocks,
    FromNode,
    PoolJoined,
    PoolLost,
    SendPool,
    StoreBlocks,
)
from kvpool.core.node.messages import FromPool, PoolFormat, PoolHello, PoolWelcome
from kvrelay.types import WIRE_VERSION, Incarnation

_RETRY_S = 0.2
"""After this time a worker connects again to the node of its host."""

_Job = StoreBlocks | FetchBlocks


class SimNodeLinks:
    """`nodes` are those of all hosts, `post` leads to the worker."""

    def __init__(
        self,
        clock: Clock,
        fabric: Fabric,
        me: Incarnation,
        format_: PoolFormat,
        nodes: Mapping[Incarnation, SimPoolNode],
        post: Callable[[Sequence[CoreEvent]], None],
    ) -> None:
        self.stored_blocks = 0
        self._clock = clock
        self._fabric = fabric
        self._me = me
        self._format = format_
        self._nodes = nodes
        self._post = post
        self._host: SimHost | None = None
        self._links: dict[Incarnation, NodeLink] = {}
        """# node, as the core calls it |-> the link to it"""
        self._jobs: defaultdict[Incarnation, list[tuple[bool, int, _Job]]] = defaultdict(list)
        self._order = count()
        self._busy: set[Incarnation] = set()
        """Nodes, as the core calls them, whose thread does a job."""
        self._is_dead = False

    @property
    def executors(self) -> dict[type, Callable[[Any], None]]:
        """# command |-> who does it"""
        return {
            ConnectNode: self._connect,
            CloseNode: self._close,
            SendPool: self._send,
            StoreBlocks: self._put,
            FetchBlocks: self._put,
        }

    def die(self) -> None:
        self._is_dead = True
        for link in self._links.values():
            link.node.hang_up(link)

    # --- links ----------------------------------------------------------------------------------

    def live_on(self, host: SimHost) -> None:
        self._host = host
        self.look_for_own_node()

    def look_for_own_node(self, _: None = None) -> None:
        """Connects to the node of this host, if it runs."""
        if self._is_dead or self._host is None or OWN_NODE in self._links:
            return
        if self._host.node is not None:
            self._open(OWN_NODE, self._nodes[self._host.node])

    def _connect(self, command: ConnectNode) -> None:
        self._open(command.node, self._nodes[command.node])

    def _open(self, name: Incarnation, node: SimPoolNode) -> None:
        link = NodeLink(self._me, node, self._hear, self._lost)
        self._links[name] = link
        hello = PoolHello(
            wire_version=WIRE_VERSION,
            incarnation=self._me,
            format=self._format,
            looks_up=name == OWN_NODE,
        )
        node.send(link, hello)

    def _close(self, command: CloseNode) -> None:
        link = self._links.pop(command.node, None)
        if link is not None:
            link.node.hang_up(link)

    def _send(self, command: SendPool) -> None:
        link = self._links.get(command.node)
        if link is not None:
            link.node.send(link, command.message)

    def _hear(self, link: NodeLink, message: FromPool) -> None:
        name = next(self._names(link))
        if isinstance(message, PoolWelcome):
            self._post((PoolJoined(node=name, welcome=message),))
        else:
            self._post((FromNode(node=name, message=message),))

    def _lost(self, link: NodeLink) -> None:
        for name in [*self._names(link)]:
            del self._links[name]
            self._post((PoolLost(node=name, reason=GONE),))
            if name == OWN_NODE:
                self._clock.after(_RETRY_S, self.look_for_own_node)

    def _names(self, link: NodeLink) -> Iterator[Incarnation]:
        return (name for name, known in self._links.items() if known is link)

    # --- the threads of the nodes ---------------------------------------------------------------

    def _put(self, job: _Job) -> None:
        heappush(self._jobs[job.node], (isinstance(job, StoreBlocks), next(self._order), job))
        self._work(job.node)

    def _work(self, node: Incarnation) -> None:
        if node in self._busy or self._is_dead:
            return
        if not self._jobs[node]:
            del self._jobs[node]
            return
        self._busy.add(node)
        job = heappop(self._jobs[node])[2]
        began_s, link = self._clock.now_s, self._links.get(job.node)
        ends_s = began_s if link is None or link.is_cut else self._ends_s(job, link.node)
        self._clock.at(ends_s, self._end, (job, link, began_s))

    def _ends_s(self, job: _Job, node: SimPoolNode) -> float:
        now_s, nbytes = self._clock.now_s, len(job.places) * self._format.block_bytes
        fabric, memory = self._fabric, node.host.memory
        if isinstance(job, StoreBlocks):
            return memory.move(nbytes, fabric.copy(self._me, nbytes, now_s))
        if job.node == OWN_NODE:
            return fabric.copy(self._me, nbytes, memory.move(nbytes, now_s))
        asked_s = now_s + fabric.config.latency
        there_s = fabric.move(node.incarnation, self._me, nbytes, asked_s)
        return fabric.copy(self._me, nbytes, there_s)

    def _end(self, ended: tuple[_Job, NodeLink | None, float]) -> None:
        job, link, began_s = ended
        if self._is_dead:
            return
        self._busy.discard(job.node)
        if link is not None and (link.is_cut or link.node.region != job.region):
            link = None
        seconds = self._clock.now_s - began_s
        if isinstance(job, StoreBlocks):
            self._post((self._stored(job, link, seconds),))
        else:
            self._post((self._fetched(job, link, seconds),))
        self._work(job.node)

    def _stored(self, job: StoreBlocks, link: NodeLink | None, seconds: float) -> BlocksStored:
        checksums = () if link is None else link.node.host.memory.write(job.places)
        self.stored_blocks += len(checksums)
        return BlocksStored(
            node=job.node,
            request_no=job.request_no,
            region=job.region,
            checksums=checksums,
            bytes=len(checksums) * self._format.block_bytes,
            seconds=seconds,
            error=GONE if link is None else None,
        )

    def _fetched(self, job: FetchBlocks, link: NodeLink | None, seconds: float) -> BlocksFetched:
        sound = 0 if link is None else _sound(link.node.host, job)
        return BlocksFetched(
            node=job.node,
            request_no=job.request_no,
            region=job.region,
            sound_blocks=sound,
            damaged=link is not None and sound < len(job.places),
            bytes=sound * self._format.block_bytes,
            seconds=seconds,
            error=GONE if link is None else None,
        )


def _sound(host: SimHost, job: FetchBlocks) -> int:
    """The number of blocks before the first one whose bytes are others."""
    pairs = zip(job.places, job.checksums, strict=True)
    bad = (i for i, (place, checksum) in enumerate(pairs) if not host.memory.has(place, checksum))
    return next(bad, len(job.places))
