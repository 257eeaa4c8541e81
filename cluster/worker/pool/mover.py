"""The pool thread of a worker: carries blocks to pool nodes and back, fetches first.

It reads and writes only blocks that an offer or a fetch holds, in parallel with the device thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.worker.pool.link import PoolEndpoints, PoolLink
from engine.device.threads import use_threads
from kvpool.core.fetch.client_events import BlocksFetched, BlocksStored, FetchBlocks, StoreBlocks
from kvpool.memory.host import HostBlocks, fetch_blocks, staging_bytes, store_blocks
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import RegionName
from kvrelay.errors import PeerError


@dataclass(frozen=True, slots=True)
class PoolJob:
    order: StoreBlocks | FetchBlocks
    link: PoolLink


class PoolMover:
    """`post` receives the result of each job."""

    def __init__(
        self,
        memory: KvMemory,
        endpoints: PoolEndpoints,
        *,
        post: Callable[[BlocksStored | BlocksFetched], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._endpoints = endpoints
        self._post = post
        self._crashed = crashed
        self._block_bytes = memory.layout.bytes_per_block
        self._staging = endpoints.register(staging_bytes(self._block_bytes))
        self._blocks = HostBlocks(memory, self._staging.memory)
        self._jobs: queue.PriorityQueue[tuple[int, int, PoolJob | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kvrelay-pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: PoolJob) -> None:
        priority = 1 if isinstance(job.order, FetchBlocks) else 2
        self._jobs.put((priority, next(self._order), job))

    def close(self) -> None:
        """Drops the jobs that have not begun. Call it before the endpoints are closed."""
        self._jobs.put((0, next(self._order), None))
        if self._thread.is_alive():
            self._thread.join()
        self._endpoints.deregister(self._staging)

    def _run(self) -> None:
        use_threads(1)
        try:
            while (job := self._jobs.get()[2]) is not None:
                if isinstance(job.order, StoreBlocks):
                    self._post(self._store(job.order, job.link))
                else:
                    self._post(self._fetch(job.order, job.link))
        except Exception as error:
            self._crashed(error)

    def _store(self, job: StoreBlocks, link: PoolLink) -> BlocksStored:
        started_s, error = time.monotonic(), None
        sums: tuple[int, ...] = ()
        try:
            connection, region = link.connection(), RegionName(job.region)
            sums = store_blocks(self._blocks, connection, region, job.sources, job.places)
        except PeerError as failure:
            error = str(failure)
        return BlocksStored(
            node=job.node,
            request_no=job.request_no,
            region=job.region,
            checksums=sums,
            bytes=len(sums) * self._block_bytes,
            seconds=time.monotonic() - started_s,
            error=error,
        )

    def _fetch(self, job: FetchBlocks, link: PoolLink) -> BlocksFetched:
        started_s, sound, error = time.monotonic(), 0, None
        try:
            connection, region = link.connection(), RegionName(job.region)
            sound = fetch_blocks(
                self._blocks, connection, region, job.places, job.checksums, job.targets
            )
        except PeerError as failure:
            error = str(failure)
        return BlocksFetched(
            node=job.node,
            request_no=job.request_no,
            region=job.region,
            sound_blocks=sound,
            damaged=error is None and sound < len(job.places),
            bytes=sound * self._block_bytes,
            seconds=time.monotonic() - started_s,
            error=error,
        )
