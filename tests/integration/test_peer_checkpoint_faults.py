"""What a starting worker does when those who should give it the model don't, or give something
else."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from cluster.process.net import grpc_server
from cluster.worker.checkpoint import fetch, service
from cluster.worker.checkpoint.fetch import FromPeers
from cluster.worker.checkpoint.service import OFFERS, CheckpointService, OwnCheckpoint
from engine.core.activity import StartActivity, unheard
from engine.core.checkpoint_files import CheckpointFile, CheckpointOffer
from engine.model.checkpoint import FetchedFromPeer
from engine.model.hub_cache import HubCache
from kvrelay.access.values import Access
from kvrelay.v1 import admin_pb2, admin_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.inference_pb2 import WorkerInfo
from tests.access import ACCESS, OTHER_TOKEN, TOKEN
from tests.hub import COMMIT, HUB_ID, Hub, contents_of, hub_of
from tests.integration.faces_kit import in_loop
from tests.models import random_checkpoint
from tests.unit.test_hub_cache import files_of, fill

CONTENTS = {
    "config.json": b"{}",
    "empty.txt": b"",
    "tokenizer.json": bytes(range(256)) * 40,
    "model-1.safetensors": bytes(range(251)) * 4_000,
    "model-2.safetensors": bytes(range(241)) * 6_000,
}
FILES = {file.name: file for file in files_of(CONTENTS)}
OFFER = CheckpointOffer(commit=COMMIT, files=files_of(CONTENTS))


class Router(admin_pb2_grpc.AdminServicer):
    """Knows these workers."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.state = admin_pb2.WORKER_STATE_READY

    async def Watch(  # noqa: N802
        self, request: admin_pb2.WatchClusterRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.WatchReport]:
        workers = [
            admin_pb2.WatchedWorker(info=WorkerInfo(address=one), state=self.state)
            for one in self.workers
        ]
        yield admin_pb2.WatchReport(workers=workers)
        await asyncio.Event().wait()


class BadPeer(CheckpointService):
    """Offers what it is told to, and sends these pieces. Then it breaks off, or says nothing."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        offer: CheckpointOffer = OFFER,
        *,
        hangs: bool = False,
        ends: bool = False,
        every_s: float = 0.0,
    ) -> None:
        self._pieces, self._offer = [*pieces], offer
        self._hangs, self._ends, self._every_s = hangs, ends, every_s
        self.asked: list[str] = []

    async def Offer(  # noqa: N802
        self, request: pb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckpointOffer:
        return OFFERS.encode(self._offer)

    async def _read(
        self, request: pb.ReadCheckpoint, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.asked += request.names
        for data in self._pieces:
            yield data
            await asyncio.sleep(self._every_s)
        if self._hangs:
            await asyncio.Event().wait()
        if not self._ends:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it broke off")


@asynccontextmanager
async def cluster_of(*peers: CheckpointService) -> AsyncIterator[str]:
    """The router's address."""
    router = Router()
    servers = [grpc_server(ACCESS) for _ in (router, *peers)]
    admin_pb2_grpc.add_AdminServicer_to_server(router, servers[0])
    for peer, server in zip(peers, servers[1:], strict=True):
        peer.add_to(server)
    ports = [server.add_insecure_port("127.0.0.1:0") for server in servers]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    router.workers = addresses[1:]
    for server in servers:
        await server.start()
    try:
        yield addresses[0]
    finally:
        for server in servers:
            await server.stop(None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """Of the host of the worker that starts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "here"))
    monkeypatch.setattr("random.shuffle", lambda _: None)
    return HubCache(HUB_ID)


def holder(folder: Path, revision: str | None = None) -> OwnCheckpoint:
    """A worker whose host has the model."""
    own = OwnCheckpoint(HUB_ID, revision)
    own.found(fill(HubCache(HUB_ID, folder), CONTENTS), None)
    return own


async def fetched(
    router: str, revision: str | None = None, access: Access = ACCESS
) -> FetchedFromPeer | None:
    peers = FromPeers(lambda: [router], access, unheard)
    return await asyncio.to_thread(peers.fetch, HUB_ID, revision)


def kept(cache: HubCache) -> set[str]:
    """Nothing else is there: no file that is not whole, and nothing outside of the blobs."""
    found = {name for name, file in FILES.items() if cache.has(file)}
    root = cache.snapshot(COMMIT).parents[1]
    whole = {root / "blobs" / FILES[name].digest for name in found}
    lock = root.parent / ".locks" / root.name / "from-peers.lock"
    top = root.parents[1] / "here"
    assert {path for path in top.rglob("*") if path.is_file()} - {lock} - links(cache) == whole
    for name in found:
        assert (root / "blobs" / FILES[name].digest).read_bytes() == CONTENTS[name]
    return found


def links(cache: HubCache) -> set[Path]:
    return {path for path in cache.snapshot(COMMIT).rglob("*") if path.is_symlink()}


SMALL_FIRST = sorted(FILES.values(), key=lambda file: file.nbytes)


def pieces_of(*names: str) -> list[bytes]:
    """As a peer sends them."""
    return [
        CONTENTS[name][i : i + 1_000_000]
        for name in names
        for i in range(0, len(CONTENTS[name]), 1_000_000)
    ]


TEXTS = ("empty.txt", "config.json", "tokenizer.json")


@in_loop
async def test_everything_comes(
    cache: HubCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[StartActivity] = []
    caplog.set_level(logging.INFO)
    async with cluster_of(CheckpointService(holder(tmp_path / "there"))) as router:
        peers = FromPeers(lambda: ["127.0.0.1:9", router], ACCESS, heard.append)
        given = await asyncio.to_thread(peers.fetch, HUB_ID, None)
        again = await fetched(router, "main")
    assert given == again == FetchedFromPeer(commit=COMMIT, folder=cache.snapshot(COMMIT))
    assert kept(cache) == {*CONTENTS}
    assert {path.name: path.read_bytes() for path in links(cache)} == CONTENTS
    total = sum(map(len, CONTENTS.values()))
    assert (heard[-1].done_bytes, heard[-1].total_bytes) == (total, total)
    assert caplog.text.count("the model from the worker at") == 1, "nothing comes twice"


class OfAnEarlierVersion(CheckpointService):
    def add_to(self, server: grpc.aio.Server) -> None:
        """It does not know these calls."""


class Counting(CheckpointService):
    def __init__(self, own: OwnCheckpoint) -> None:
        super().__init__(own)
        self.asked: list[str] = []

    async def _read(
        self, request: pb.ReadCheckpoint, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.asked += request.names
        async for piece in super()._read(request, context):
            yield piece


@in_loop
async def test_workers_that_start_on_one_host_fetch_it_once(
    cache: HubCache, tmp_path: Path
) -> None:
    peer = Counting(holder(tmp_path / "there"))
    async with cluster_of(peer) as router:
        given = await asyncio.gather(*(fetched(router) for _ in range(3)))
    assert given == 3 * [FetchedFromPeer(commit=COMMIT, folder=cache.snapshot(COMMIT))]
    assert sorted(peer.asked) == sorted(CONTENTS)


@in_loop
async def test_those_who_have_something_else(
    cache: HubCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = holder(tmp_path / "there", "release-1")
    async with cluster_of(CheckpointService(own)) as router:
        assert await fetched(router, None) is None
        assert await fetched(router, "release-2") is None
        assert await fetched(router, "b" * 40) is None
        assert kept(cache) == set()
        monkeypatch.setattr(fetch, "MOST_ASKED", 0)
        assert await fetched(router, "release-1") is None
        monkeypatch.undo()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "here"))
        by_name, by_commit = await fetched(router, "release-1"), await fetched(router, COMMIT)
    assert by_name == by_commit == FetchedFromPeer(commit=COMMIT, folder=cache.snapshot(COMMIT))


@in_loop
async def test_a_file_that_is_damaged_there(cache: HubCache, tmp_path: Path) -> None:
    own = holder(tmp_path / "there")
    there = HubCache(HUB_ID, tmp_path / "there").snapshot(COMMIT)
    blob = (there / "model-1.safetensors").resolve()
    blob.write_bytes(b"\0" * blob.stat().st_size)
    async with cluster_of(CheckpointService(own)) as router:
        given = await fetched(router)
    assert given == FetchedFromPeer(commit=COMMIT, folder=None)
    assert kept(cache) >= {"config.json", "empty.txt", "tokenizer.json"}
    assert "model-1.safetensors" not in kept(cache)
    assert not links(cache), "no snapshot that is not whole"


@in_loop
async def test_one_that_stops_in_the_middle(cache: HubCache, tmp_path: Path) -> None:
    """The next one is asked for the rest alone."""
    begun = [*pieces_of(*TEXTS), CONTENTS["model-1.safetensors"][:100_000]]
    first, second = BadPeer(begun), BadPeer([])
    async with cluster_of(first) as router:
        given = await fetched(router)
        assert given == FetchedFromPeer(commit=COMMIT, folder=None)
        assert kept(cache) == {"config.json", "empty.txt", "tokenizer.json"}
    async with cluster_of(first, second, CheckpointService(holder(tmp_path / "there"))) as router:
        given = await fetched(router)
    assert second.asked == ["model-1.safetensors", "model-2.safetensors"]
    assert given == FetchedFromPeer(commit=COMMIT, folder=cache.snapshot(COMMIT))
    assert kept(cache) == {*CONTENTS}


@in_loop
async def test_no_two_commits_are_mixed(cache: HubCache, tmp_path: Path) -> None:
    """The next worker is asked for the commit of the first one: its `main` may be another one."""
    there = HubCache(HUB_ID, tmp_path / "there")
    fill(there, CONTENTS)
    other = OwnCheckpoint(HUB_ID, None)
    other.found(there.link("c" * 40, files_of(CONTENTS)), None)
    async with cluster_of(BadPeer([b"{}"]), CheckpointService(other)) as router:
        assert await fetched(router) == FetchedFromPeer(commit=COMMIT, folder=None)
    assert kept(cache) == {"empty.txt", "config.json"}


@pytest.mark.parametrize(
    ("pieces", "stays"),
    [
        ([*pieces_of(*TEXTS, "model-1.safetensors"), b"x"], 4),
        ([*pieces_of(*TEXTS), bytes(1_004_000)], 3),
        ([b"{}more than it is"], 1),
        ([b"[]"], 1),
        ([b"{"], 1),
        ([], 0),
    ],
)
@in_loop
async def test_pieces_that_are_not_taken(cache: HubCache, pieces: list[bytes], stays: int) -> None:
    """And then it breaks off."""
    async with cluster_of(BadPeer(pieces)) as router:
        assert await fetched(router) == FetchedFromPeer(commit=COMMIT, folder=None)
    assert len(kept(cache)) == stays


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([b"{}", b"again"], "more than it was asked for"),
        ([b"{}again"], "config.json is longer than 2 bytes"),
        ([b"[]"], "config.json is damaged: its digest is wrong"),
        ([b"{"], "config.json ends too early"),
        ([], "config.json ends too early"),
    ],
)
@in_loop
async def test_an_end_that_is_not_taken(
    cache: HubCache, pieces: list[bytes], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    offer = CheckpointOffer(commit=COMMIT, files=(FILES["config.json"],))
    async with cluster_of(BadPeer(pieces, offer, ends=True)) as router:
        assert await fetched(router) == FetchedFromPeer(commit=COMMIT, folder=None)
    assert why in caplog.text


@in_loop
async def test_an_offer_that_leads_out_of_the_cache(cache: HubCache) -> None:
    evil = CheckpointFile(
        name="../../../../evil.json", digest=FILES["config.json"].digest, nbytes=2
    )
    peer = BadPeer([b"{}"], CheckpointOffer(commit=COMMIT, files=(evil,)))
    async with cluster_of(peer) as router:
        assert await fetched(router) is None
    assert peer.asked == []
    assert kept(cache) == set()


@pytest.mark.parametrize("pieces", [[], [b"{}"]])
@in_loop
async def test_one_that_falls_silent(
    cache: HubCache,
    pieces: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fetch, "SILENT_S", 0.3)
    async with cluster_of(BadPeer(pieces, hangs=True)) as router:
        assert await fetched(router) == FetchedFromPeer(commit=COMMIT, folder=None)
    assert "it has sent nothing for 0.3 s" in caplog.text
    assert kept(cache) <= {"empty.txt", "config.json"}


@in_loop
async def test_one_that_is_slower_than_the_hub(
    cache: HubCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No other worker is asked: their links are alike."""
    monkeypatch.setattr("engine.core.checkpoint_files.JUDGE_S", 0.2)
    caplog.set_level(logging.INFO)
    fast_hub = CheckpointOffer(commit=COMMIT, files=OFFER.files, hub_bytes_per_s=1e12)
    content = CONTENTS["tokenizer.json"]
    trickle = [b"{}", *(content[i : i + 10] for i in range(0, 1_000, 10))]
    slow, other = BadPeer(trickle, fast_hub, every_s=0.05), BadPeer([], fast_hub)
    async with cluster_of(slow, other) as router:
        assert await fetched(router) == FetchedFromPeer(commit=COMMIT, folder=None)
    assert "the hub is faster" in caplog.text
    assert other.asked == []


@in_loop
async def test_nobody_to_ask(cache: HubCache, tmp_path: Path) -> None:
    """No router; no worker; one that does not know this call; a caller without the token."""
    assert await fetched("127.0.0.1:9") is None
    async with cluster_of() as router:
        assert await fetched(router) is None
    async with cluster_of(OfAnEarlierVersion(holder(tmp_path / "there"))) as router:
        assert await fetched(router) is None
    async with cluster_of(CheckpointService(OwnCheckpoint(HUB_ID, None))) as router:
        assert await fetched(router) is None, "it has not got the model yet"
    async with cluster_of(CheckpointService(holder(tmp_path / "there"))) as router:
        assert await fetched(router, access=Access(token=bytes(32))) is None
    assert kept(cache) == set()


@in_loop
async def test_a_cache_that_can_not_be_written(
    cache: HubCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "here").write_text("a file, no folder")
    async with cluster_of(CheckpointService(holder(tmp_path / "there"))) as router:
        assert await fetched(router) is None
    assert "can't be fetched from other workers" in caplog.text


Read = Callable[..., grpc.aio.UnaryStreamCall[pb.ReadCheckpoint, bytes]]
NOT_OFFERED = ("../../refs/main", "/etc/passwd", "", "README.md", "sub/config.json")


@in_loop
async def test_only_what_is_offered_is_given(tmp_path: Path) -> None:
    own = holder(tmp_path / "there")
    folder = HubCache(HUB_ID, tmp_path / "there").snapshot(COMMIT)
    (folder / "README.md").write_text("for people")
    async with cluster_of(CheckpointService(own)) as _, only(own) as read:
        for name in NOT_OFFERED:
            assert await refusal(read, COMMIT, name) is grpc.StatusCode.NOT_FOUND
        for commit in ("b" * 40, "../" + "a" * 37, "", "main"):
            assert await refusal(read, commit) is grpc.StatusCode.NOT_FOUND


@in_loop
async def test_strangers_read_nothing(tmp_path: Path) -> None:
    request = pb.ReadCheckpoint(commit=COMMIT, names=["config.json"])
    async with only(holder(tmp_path / "there")) as read:
        for shown in ((), Access(token=OTHER_TOKEN).metadata):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await read(request, metadata=shown).read()
        assert await read(request, metadata=ACCESS.metadata).read() == b"{}"


async def refusal(read: Read, commit: str, *more: str) -> grpc.StatusCode:
    """How it ends, with not a byte given."""
    request = pb.ReadCheckpoint(commit=commit, names=["config.json", *more])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(request, metadata=ACCESS.metadata).read()
    return caught.value.code()


@asynccontextmanager
async def only(own: OwnCheckpoint) -> AsyncIterator[Read]:
    server = grpc_server(ACCESS)
    CheckpointService(own).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_stream(
            "/kvrelay.v1.Checkpoints/Read", request_serializer=pb.ReadCheckpoint.SerializeToString
        )
    await server.stop(None)


@in_loop
async def test_only_so_many_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes makes room, however it goes."""
    monkeypatch.setattr(service, "PIECE_BYTES", 1000)
    request = pb.ReadCheckpoint(commit=COMMIT, names=["model-2.safetensors"])
    async with only(holder(tmp_path / "there")) as read:
        reading = [read(request, metadata=ACCESS.metadata) for _ in range(service.MOST_READERS)]
        for one in reading:
            assert len(await one.read()) == 1000
        with pytest.raises(grpc.aio.AioRpcError, match="workers read here already"):
            await read(request, metadata=ACCESS.metadata).read()
        reading[0].cancel()
        while True:
            third = read(request, metadata=ACCESS.metadata)
            try:
                assert len(await third.read()) == 1000
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
        for one in (third, *reading):
            one.cancel()


REST = """
from cluster.worker.checkpoint.fetch import FromPeers
from engine.core.activity import unheard
from engine.model.checkpoint import open_checkpoint
from kvrelay.access.values import Access
peers = FromPeers(lambda: ["{router}"], Access(token=bytes.fromhex("{token}")), unheard)
print(open_checkpoint("{model}", None, from_peers=peers.fetch).path)
"""


@in_loop
async def test_the_hub_has_the_rest(tmp_path: Path) -> None:
    """Of the same commit; then the revision is known without it."""
    contents = contents_of(random_checkpoint(tmp_path / "model"))
    texts = {name: content for name, content in contents.items() if "safetensors" not in name}
    small_first = sorted(files_of(contents), key=lambda file: file.nbytes)
    pieces = [texts[file.name] for file in small_first if file.name in texts]
    offer = CheckpointOffer(commit=COMMIT, files=files_of(contents))
    with hub_of(contents) as hub:
        async with cluster_of(BadPeer(pieces, offer)) as router:
            first = await in_a_process(router, hub, tmp_path)
    assert hub.given == ["model.safetensors"]
    assert "main" not in hub.revisions
    async with cluster_of() as router:
        assert await in_a_process(router, hub, tmp_path) == first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == contents


async def in_a_process(router: str, hub: Hub, home: Path) -> Path:
    code = REST.format(router=router, token=TOKEN.hex(), model=HUB_ID)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        env=hub.environment(home),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
