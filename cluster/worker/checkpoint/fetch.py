"""Fetches the model of a worker that starts from workers that serve it, into this host's hub cache.

The files come over gRPC: on this path their digests and the disk are the bottleneck, not the link
(docs/benchmarks.md). What one worker leaves out the next one has, or the hub.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import grpc

from cluster.core.settings import WorkerSettings
from cluster.process.admin import report as watched
from cluster.worker.checkpoint.service import OFFERS, OwnCheckpoint, read_files
from engine.core.activity import ReportActivity, Stage, StartActivity
from engine.core.checkpoint_files import CheckpointFile, CheckpointOffer, flaw_in, is_slower
from engine.model.checkpoint import Checkpoint, FetchedFromPeer, open_checkpoint
from engine.model.hub_cache import ArrivingFile, HubCache
from kvrelay.access.tls import blocking_channel
from kvrelay.access.values import Access
from kvrelay.errors import KvrelayError, PeerError
from kvrelay.v1 import admin_pb2
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.worker_pb2_grpc import CheckpointsStub

log = logging.getLogger(__name__)

ASK_S = 5.0
"""A router or worker that does not answer for so long is not waited for."""
MOST_ASKED = 3
"""Workers; then the hub."""
SILENT_S = 10.0
"""A worker that sends nothing for so long is given up, at the latest after twice as long."""
MOST_WAITING = 4
"""Pieces in memory that are not on disk yet."""
LEAST_TIMED_BYTES = 16 << 20
"""Less says nothing about the hub's speed."""


def open_with_peers(
    settings: WorkerSettings,
    own: OwnCheckpoint,
    routers: Callable[[], Sequence[str]],
    report: ReportActivity,
) -> Checkpoint:
    """The worker's checkpoint, which it serves from then on. Raises ModelError."""
    peers = FromPeers(routers, settings.access, report)
    hub = HubSpeed(report)
    found = open_checkpoint(settings.model, settings.revision, hub.hear, peers.fetch)
    own.found(found.path, hub.bytes_per_s or peers.hub_bytes_per_s)
    return found


class HubSpeed:
    """Passes on what is reported of a download from the hub, and measures it."""

    def __init__(self, report: ReportActivity) -> None:
        self._report = report
        self._begun_s: float | None = None
        self._done_bytes, self._took_s = 0, 0.0

    def hear(self, activity: StartActivity) -> None:
        now_s = time.monotonic()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        if activity.done_bytes > self._done_bytes:
            self._done_bytes, self._took_s = activity.done_bytes, now_s - self._begun_s
        self._report(activity)

    @property
    def bytes_per_s(self) -> float | None:
        if self._done_bytes < LEAST_TIMED_BYTES or not self._took_s:
            return None
        return self._done_bytes / self._took_s


class _SlowerThanHub(Exception):
    pass


class FromPeers:
    """`hub_bytes_per_s`: as the workers say that were asked."""

    def __init__(
        self, routers: Callable[[], Sequence[str]], access: Access, report: ReportActivity
    ) -> None:
        self._routers, self._access, self._report = routers, access, report
        self.hub_bytes_per_s: float | None = None

    def fetch(self, hub_id: str, revision: str | None) -> FetchedFromPeer | None:
        """None: no worker has it. What can't be written here is the hub's to tell of."""
        self._report(StartActivity(stage=Stage.DOWNLOADS))
        cache, peers = HubCache(hub_id), self._peers()
        if not peers:
            return None
        try:
            with cache.alone():
                return self._fetch(cache, peers, hub_id, revision)
        except OSError as error:
            log.warning("%s can't be fetched from other workers: %s", hub_id, error)
            return None

    def _peers(self) -> list[str]:
        """Workers that serve, as the first router that answers knows them."""
        try:
            for router in self._routers():
                if (found := _workers_of(router, self._access)) is not None:
                    random.shuffle(found)
                    return found[:MOST_ASKED]
        except KvrelayError as error:
            log.debug("no router is known: %s", error)
        return []

    def _fetch(
        self, cache: HubCache, peers: Iterable[str], hub_id: str, revision: str | None
    ) -> FetchedFromPeer | None:
        """All of one commit: that of the first worker that has the model."""
        commit = None
        for address in peers:
            offer = self._offer_of(address, hub_id, commit or revision)
            if offer is None:
                continue
            commit, self.hub_bytes_per_s = offer.commit, offer.hub_bytes_per_s
            try:
                self._take(address, offer, cache)
            except _SlowerThanHub:
                log.info("the hub is faster, so the rest comes from there")
                break
            except PeerError as error:
                log.warning("the worker at %s gives no more of the model: %s", address, error)
            else:
                return FetchedFromPeer(commit=commit, folder=cache.link(commit, offer.files))
        return None if commit is None else FetchedFromPeer(commit=commit, folder=None)

    def _offer_of(self, address: str, hub_id: str, revision: str | None) -> CheckpointOffer | None:
        request = pb.CheckpointRequest(model=hub_id, revision=revision)
        try:
            with self._calling(address) as channel:
                stub = CheckpointsStub(channel)
                told = stub.Offer(request, timeout=ASK_S, metadata=self._access.metadata)
                offer = OFFERS.decode(told)
        except KvrelayError as error:
            log.info("the worker at %s does not give the model: %s", address, error)
            return None
        if (flaw := flaw_in(offer)) is not None:
            log.warning("the worker at %s offers a model that is not taken: %s", address, flaw)
            return None
        return offer

    def _take(self, address: str, offer: CheckpointOffer, cache: HubCache) -> None:
        """All that is not here yet; whole files stay. Raises PeerError, _SlowerThanHub or
        OSError."""
        missing = sorted(
            (file for file in offer.files if not cache.has(file)), key=lambda file: file.nbytes
        )
        if not missing:
            return
        fetch = _Fetch(missing, offer.hub_bytes_per_s, self._report)
        request = pb.ReadCheckpoint(commit=offer.commit, names=[file.name for file in missing])
        try:
            with self._calling(address) as channel, _Writing(cache, missing) as writing:
                pieces = read_files(channel, request, self._access)
                with _cut_when_silent(pieces, fetch):
                    for piece in pieces:
                        writing.take(piece)
                        fetch.got(len(piece))
                writing.end()
        finally:
            log.info("the model from the worker at %s: %s", address, fetch)

    @contextmanager
    def _calling(self, address: str) -> Iterator[grpc.Channel]:
        """Raises PeerError in place of grpc's errors. What still runs at the end is cancelled."""
        try:
            with blocking_channel(address, self._access.dials) as channel:
                yield channel
        except grpc.RpcError as error:
            raise PeerError(error.details() or error.code().name) from None


def _workers_of(router: str, access: Access) -> list[str] | None:
    """None: it does not answer."""
    try:
        told = watched(router, access, timeout_s=ASK_S)
    except (KvrelayError, StopIteration) as error:
        log.info("router %s was not asked for workers: %s", router, error)
        return None
    return [one.info.address for one in told.workers if one.state == admin_pb2.WORKER_STATE_READY]


class _Fetch:
    """How far it is, and how fast."""

    def __init__(
        self,
        files: Sequence[CheckpointFile],
        hub_bytes_per_s: float | None,
        report: ReportActivity,
    ) -> None:
        self._files, self._hub_bytes_per_s, self._report = files, hub_bytes_per_s, report
        self._total_bytes = sum(file.nbytes for file in files)
        self.done_bytes = 0
        self._begun_s = time.monotonic()

    def got(self, nbytes: int) -> None:
        """Raises _SlowerThanHub."""
        self.done_bytes += nbytes
        done, total = self.done_bytes, self._total_bytes
        self._report(StartActivity(stage=Stage.DOWNLOADS, done_bytes=done, total_bytes=total))
        if is_slower(done, time.monotonic() - self._begun_s, self._hub_bytes_per_s):
            raise _SlowerThanHub

    def __str__(self) -> str:
        took_s = max(time.monotonic() - self._begun_s, 1e-6)
        part = f"{self.done_bytes / 1e9:.3f} of {self._total_bytes / 1e9:.3f} GB"
        speed = f"{self.done_bytes / took_s / 1e9:.2f} GB/s"
        hub = self._hub_bytes_per_s
        beside = "" if hub is None else f" (the hub: {hub / 1e9:.2f} GB/s)"
        return f"{len(self._files)} files, {part} in {took_s:.1f} s, {speed}{beside}"


@contextmanager
def _cut_when_silent(call: grpc.Call, fetch: _Fetch) -> Iterator[None]:
    """Reading raises PeerError when nothing has come for SILENT_S."""
    over, is_cut = threading.Event(), threading.Event()

    def watch() -> None:
        seen = -1
        while fetch.done_bytes != seen:
            seen = fetch.done_bytes
            if over.wait(SILENT_S):
                return
        is_cut.set()
        call.cancel()

    thread = threading.Thread(target=watch, name="kvrelay-fetch-watch", daemon=True)
    thread.start()
    try:
        yield
    except grpc.RpcError:
        if is_cut.is_set():
            raise PeerError(f"it has sent nothing for {SILENT_S:g} s") from None
        raise
    finally:
        over.set()
        thread.join()


class _Writing:
    """Puts pieces on disk, in a thread of its own: their digests take longer than their way here.
    What is not whole at the end is gone."""

    def __init__(self, cache: HubCache, files: Iterable[CheckpointFile]) -> None:
        self._cache, self._files = cache, iter(files)
        self._arriving: ArrivingFile | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvrelay-fetch")
        self._waiting: deque[Future[None]] = deque()

    def take(self, piece: bytes) -> None:
        """Raises what the writing of an earlier one raised."""
        self._waiting.append(self._thread.submit(self._write, piece))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft().result()

    def end(self) -> None:
        """All pieces have come. Raises PeerError when a file is not whole."""
        self._waiting.append(self._thread.submit(self._finish))
        for one in self._waiting:
            one.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """What has come in time stays, if it is whole."""
        self._thread.shutdown()
        if self._arriving is not None:
            self._arriving.discard()

    # --- the thread -----------------------------------------------------------------------------

    def _write(self, piece: bytes) -> None:
        """No piece is of two files."""
        while self._arriving is None and self._begin_next():
            pass
        if self._arriving is None:
            raise PeerError("it sends more than it was asked for")
        self._arriving.write(piece)
        self._keep_whole()

    def _finish(self) -> None:
        while self._arriving is None and self._begin_next():
            pass
        if self._arriving is not None:
            raise PeerError(f"{self._arriving.file.name} ends too early")

    def _begin_next(self) -> bool:
        """False: there is no other. One that is empty is whole at once."""
        file = next(self._files, None)
        if file is not None:
            self._arriving = self._cache.receive(file)
            self._keep_whole()
        return file is not None

    def _keep_whole(self) -> None:
        if self._arriving is not None and self._arriving.is_whole:
            arriving, self._arriving = self._arriving, None
            try:
                arriving.keep()
            finally:
                arriving.discard()
