"""Carries blocks between a worker and one pool node, fetches first, on a thread of its own: a node
that hangs holds up no other.

It reads and writes only blocks that an offer or a fetch holds, in parallel with the device thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.worker.pool.link import PoolEndpoints, PoolLink
from engine.device.threads import use_threads
from kvpool.core.fetch.client_events import BlocksFetched, BlocksStored, FetchBlocks, StoreBlocks
from kvpool.memory.host import HostBlocks, fetch_blocks, staging_bytes, store_blocks
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import RegionName
from kvrelay.errors import PeerError

Job = StoreBlocks | FetchBlocks
NOW, FETCH, STORE, LAST = range(4)
"""What comes first."""


class PoolMover:
    """`link` leads to the node, and `post` receives the result of each job."""

    def __init__(
        self,
        memory: KvMemory,
        endpoints: PoolEndpoints,
        link: PoolLink,
        *,
        post: Callable[[BlocksStored | BlocksFetched], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._memory = memory
        self._endpoints = endpoints
        self._link = link
        self._post = post
        self._crashed = crashed
        self._block_bytes = memory.layout.bytes_per_block
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kvrelay-pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        """Never waits."""
        self._jobs.put((FETCH if isinstance(job, FetchBlocks) else STORE, next(self._order), job))

    def end(self) -> None:
        """Ends after the jobs that it has. Never waits."""
        self._jobs.put((LAST, next(self._order), None))

    def drop(self) -> None:
        """Ends after the job that is under way. Never waits."""
        self._jobs.put((NOW, next(self._order), None))

    def join(self, until_s: float) -> None:
        """Waits until then at most. Call it before the endpoints are closed."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        use_threads(1)
        try:
            with self._staged():
                while (job := self._jobs.get()[2]) is not None:
                    if isinstance(job, StoreBlocks):
                        self._post(self._store(job))
                    else:
                        self._post(self._fetch(job))
        except Exception as error:
            self._crashed(error)

    @contextmanager
    def _staged(self) -> Iterator[None]:
        """With memory through which the bytes go."""
        staging = self._endpoints.register(staging_bytes(self._block_bytes))
        self._blocks = HostBlocks(self._memory, staging.memory)
        try:
            yield
        finally:
            self._endpoints.deregister(staging)

    def _store(self, job: StoreBlocks) -> BlocksStored:
        started_s, error = time.monotonic(), None
        sums: tuple[int, ...] = ()
        try:
            connection, region = self._link.connection(), RegionName(job.region)
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

    def _fetch(self, job: FetchBlocks) -> BlocksFetched:
        started_s, sound, error = time.monotonic(), 0, None
        try:
            connection, region = self._link.connection(), RegionName(job.region)
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
