"""`kvrelay pool-node` as a real process: KV outlives workers, and on disk the node itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from cluster.core.settings import PoolNodeSettings, host_pool_address
from cluster.pool_node.node import PoolNode
from kvpool.core.fetch.client_events import OfferConfirmed, OfferSettled
from kvpool.core.fetch.fetches import Restored
from kvrelay.types import Incarnation
from tests.access import OTHER_TOKEN, TOKEN, token_file
from tests.integration import pool_kit
from tests.integration.pool_kit import Node, chain, layout, pool_worker, refused
from tests.integration.ray_head import until

ROOT = Path(__file__).parents[2]
BLOCK = layout().bytes_per_block


class Start:
    """Nodes of one cluster, one after another, each with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"test-{uuid4().hex[:12]}"
        self.address = host_pool_address(self.name)
        self.folder = folder
        self.disk = folder / "disk"
        self.nodes: list[Node] = []

    def __call__(self, *options: str) -> Node:
        log = self.folder / f"node-{len(self.nodes)}"
        self.nodes.append(Node(log, self.name, *options))
        return self.nodes[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    left = [node for node in start.nodes if node.is_alive]
    for node in left:
        node.kill()
    assert not left, "all have ended by themselves"


def _host(blocks: int) -> tuple[str, str]:
    return "--host-memory", f"{blocks * BLOCK}B"


def _disk(folder: Path, size: str = "64MiB") -> tuple[str, ...]:
    return "--disk", str(folder), "--disk-size", size


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_a_worker_stored_is_there_when_it_is_gone(start: Start) -> None:
    node = start(*_host(32))
    hashes, other = chain(1, 20), chain(2, 3)
    with pool_worker(start.address) as first:
        first.await_connected()
        first.store(hashes, first_block=4)
        assert first.seek(hashes) == (20, 0)
        assert first.seek(other) == (0, 0)
        kept = [plane.clone() for plane in first.blocks(4, 20)]
    with pool_worker(start.address, seed=1) as second:
        second.await_connected()
        assert second.fetch((*hashes, *other), first_block=9) == 20
        assert _same(second.blocks(9, 20), kept)
        assert second.fetch(other) == 0
    node.stop()


def test_a_full_tier_evicts_the_oldest(start: Start) -> None:
    node = start(*_host(8))
    with pool_worker(start.address) as worker:
        worker.await_connected()
        worker.store(chain(1, 3))
        worker.store(chain(2, 4))
        worker.store(chain(3, 4))
        assert worker.seek(chain(1, 3)) == (0, 0)
        assert worker.seek(chain(2, 4)) == (4, 0)
        assert worker.seek(chain(3, 4)) == (4, 0)
    node.stop()


def test_a_worker_killed_while_it_stores_leaves_nothing(start: Start) -> None:
    node = start(*_host(8))
    address = start.address
    command = [sys.executable, "-m", pool_kit.__name__, address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"granted\n"
        with pool_worker(address) as worker:
            worker.await_connected()
            worker.store(chain(1, 8))
            assert worker.seek(chain(1, 8)) == (0, 0), "all places are the other worker's"
            writer.kill()
            writer.wait()
            until(lambda: node.text.count(" left: ") == 1)
            worker.store(chain(1, 8))
            assert worker.seek(chain(1, 8)) == (8, 0)
            assert worker.fetch(chain(1, 8), first_block=20) == 8
            assert _same(worker.blocks(20, 8), worker.blocks(0, 8))
    node.stop()


def test_a_node_killed_while_a_worker_fetches_is_a_clean_loss(start: Start) -> None:
    node = start(*_host(32))
    with pool_worker(start.address) as worker:
        worker.await_connected()
        worker.store(chain(1, 8))
        node.suspend()
        holder = worker.want(chain(1, 8), first_block=20)
        offer = worker.offer(chain(2, 8))
        node.kill()
        answers = [worker.answer() for _ in range(3)]
        assert Restored.found_here(holder, 0) in answers
        ends = [answer for answer in answers if not isinstance(answer, Restored)]
        assert ends == [OfferSettled(offer=offer), OfferConfirmed(offer=offer)]
        assert worker.stores.idle
        assert not worker.stores.connected
        worker.store(chain(3, 8))  # dropped at once
        node = start(*_host(32))
        worker.await_connected()
        assert worker.seek(chain(1, 8)) == (0, 0)
        worker.store(chain(1, 8))
        assert worker.fetch(chain(1, 8), first_block=20) == 8
    node.stop()


def test_a_node_that_hangs_holds_up_one_request(start: Start) -> None:
    node = start(*_host(32))
    with pool_worker(start.address) as worker:
        worker.await_connected()
        worker.store(chain(1, 8))
        node.suspend()
        waited_s = [_seconds(lambda: worker.fetch(chain(1, 8), first_block=20)) for _ in range(20)]
        waited_s.append(_seconds(lambda: worker.store(chain(2, 8))))
        print(f"waits: {[round(s, 3) for s in waited_s]}")
        assert waited_s[0] == pytest.approx(5.0, abs=1.0), "its patience"
        assert max(waited_s[1:]) < 0.5, "the others do not ask"
        assert worker.seek(chain(1, 8)) == (0, 0)
        node.signal(signal.SIGCONT)
        assert until(lambda: worker.pump() or worker.seek(chain(1, 8)) == (8, 0))
        assert worker.fetch(chain(1, 8), first_block=20) == 8
    node.stop()


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def test_what_is_on_disk_comes_back(start: Start) -> None:
    hashes = chain(1, 20)
    node = start(*_host(32), *_disk(start.disk))
    assert "nothing on disk yet" in node.text
    with pool_worker(start.address) as worker:
        worker.await_connected()
        worker.store(hashes)
        kept = [plane.clone() for plane in worker.blocks(0, 20)]
        node.stop()
        assert node.text.endswith("20 blocks in memory are gone, 20 on disk stay\n")
        worker.await_connected(False)
        node = start(*_host(6), *_disk(start.disk))
        assert "20 blocks (1280KiB) on disk" in node.text
        worker.await_connected()
        assert worker.seek(hashes) == (0, 20)
        assert worker.fetch(hashes, first_block=30) == 6, "as many as memory takes at once"
        assert _same(worker.blocks(30, 6), [plane[:, : 6 * 16] for plane in kept])
        assert worker.seek(hashes) == (6, 14)
    node.stop()


def test_a_damaged_slot_is_dropped_and_never_served(start: Start) -> None:
    hashes = chain(1, 10)
    options = (*_host(32), *_disk(start.disk))
    node = start(*options)
    with pool_worker(start.address) as worker:
        worker.await_connected()
        worker.store(hashes)
        node.stop()
        (segment,) = start.disk.glob("*.segment")
        with segment.open("r+b") as file:
            file.seek(4096 + 6 * (512 + BLOCK) + 512 + 1000)  # within the seventh block
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        (start.disk / "kvrelay-000007.segment").write_bytes(b"not ours")
        node = start(*options)
        assert "kvrelay-000007.segment is damaged" in node.text
        worker.await_connected(False)
        worker.await_connected()
        assert worker.fetch(hashes, first_block=30) == 6
        assert _same(worker.blocks(30, 6), worker.blocks(0, 6))
        assert worker.seek(hashes) == (6, 0)
        until(lambda: "damaged: its block is dropped" in node.text)
        worker.store(hashes)
        assert worker.seek(hashes) == (10, 0)
    node.stop()


def test_a_killed_node_loses_only_what_was_not_written(start: Start) -> None:
    hashes = chain(1, 30)
    options = (*_host(32), *_disk(start.disk))
    node = start(*options)
    with pool_worker(start.address) as worker:
        worker.await_connected()
        worker.store(hashes)
        node.kill()
        node = start(*options)
        worker.await_connected(False)
        worker.await_connected()
        in_memory, on_disk = worker.seek(hashes)
        assert in_memory == 0
        whole = worker.fetch(hashes, first_block=32)
        assert on_disk - 1 <= whole <= on_disk, "only the block that was being written is torn"
        assert _same(worker.blocks(32, whole), worker.blocks(0, whole))
    node.stop()


def test_another_model_is_refused_and_an_old_ones_disk_is_replaced(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    options = (*_host(32), *_disk(start.disk))
    node = start(*options)
    address = start.address
    with pool_worker(address) as worker:
        worker.await_connected()
        worker.store(chain(1, 4))
        with pool_worker(address, kv=layout(dim=32)) as stranger:
            until(lambda: "refused: its blocks are bfloat16/block16" in node.text)
            until(lambda: "refuses this worker: its blocks are" in caplog.text)
            assert not stranger.stores.connected
            worker.store(chain(2, 4))
    node.stop()
    node = start(*options)
    assert "8 blocks (512KiB) on disk" in node.text
    with pool_worker(address, kv=layout(dim=32)) as stranger:
        stranger.await_connected()
        assert re.search(r"the disk held bfloat16/block16 of 65536 bytes.*deleted", node.text)
        stranger.store(chain(1, 4))
        assert stranger.seek(chain(1, 4)) == (4, 0)
    node.stop()


def test_one_node_for_each_host_and_folder(start: Start, tmp_path: Path) -> None:
    node = start(*_host(8), *_disk(start.disk))
    said = refused(tmp_path / "same-host", start.name, *_host(8))
    assert said.startswith(f"kvrelay: a pool node of the cluster {start.name} runs on this host")
    assert said.count("\n") == 1
    said = refused(tmp_path / "same-folder", f"{start.name}-2", *_host(8), *_disk(start.disk))
    assert said == f"kvrelay: pool.disk: another pool node uses {start.disk}\n"
    node.stop()


def test_workers_of_other_hosts_come_over_nixl(start: Start) -> None:
    node = start(*_host(16), "--transport", "nixl")
    until(lambda: len(node.addresses()) == 2)
    near, far = node.addresses()
    assert near == start.address
    with pool_worker(near) as writer, pool_worker(far, seed=1, secret=TOKEN) as reader:
        writer.await_connected()
        reader.await_connected()
        writer.store(chain(1, 8))
        assert writer.seek(chain(1, 8)) == (8, 0)
        assert reader.fetch(chain(1, 8)) == 8
        assert _same(reader.blocks(0, 8), writer.blocks(0, 8))
        reader.store(chain(2, 8), first_block=30)
        assert reader.seek(chain(2, 8)) == (8, 0)
        assert writer.fetch(chain(2, 8), first_block=30) == 8
        assert _same(reader.blocks(30, 8), writer.blocks(30, 8))
    node.stop()


def test_only_workers_that_have_the_token_come_over_nixl(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = start(*_host(16), "--transport", "nixl", "--token-file", token_file(tmp_path))
    until(lambda: len(node.addresses()) == 2)
    _, far = node.addresses()
    caplog.set_level("INFO")
    with (
        pool_worker(far, secret=b"wrong") as stranger,
        pool_worker(far, secret=OTHER_TOKEN) as friend,
    ):
        friend.await_connected()
        refusal = "refused: its cluster has another token"
        until(lambda: refusal in caplog.text)
        assert not stranger.stores.connected
    node.stop()


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
def test_a_worker_reads_from_the_node_of_another_host(
    start: Start, tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over the transport that both have; another node in its place is not believed."""
    token = ("--token-file", token_file(tmp_path))
    here, there = (
        start(*_host(16)),
        Node(tmp_path / "far", f"{start.name}-far", *_host(16), "--transport", transport, *token),
    )
    until(lambda: len(there.addresses()) == 2)
    near, far = there.addresses()
    options = {"far_transports": (transport,), "secret": OTHER_TOKEN}
    with pool_worker(near) as writer, pool_worker(start.address, seed=1, **options) as reader:
        writer.await_connected()
        reader.await_connected()
        writer.store(chain(1, 8))
        node = writer.node
        assert reader.fetch_far(node, far, chain(1, 8), first_block=4) == 8
        assert _same(reader.blocks(4, 8), writer.blocks(0, 8))
        assert reader.fetch_far(node, far, chain(2, 3)) == 0
        assert reader.seek(chain(1, 8)) == (0, 0), "its own pool is another"
        stranger = Incarnation("f" * 32)
        assert reader.fetch_far(stranger, far, chain(1, 8)) == 0
        assert f"expected pool node {stranger}, found {node}" in caplog.text
        there.kill()
        assert reader.fetch_far(node, far, chain(1, 8)) == 0
    here.stop()


def test_it_answers_when_its_loop_comes_round_and_not_before() -> None:
    settings = PoolNodeSettings(
        name=f"test-{uuid4().hex[:12]}",
        host_bytes=2**20,
        disk=None,
        disk_bytes=0,
        policy="lru",
        lease_ttl_s=30.0,
        transports=(),
        host="127.0.0.1",
        port_range=None,
    )

    async def scene() -> None:
        node = PoolNode(settings)
        answer = asyncio.ensure_future(node.answer())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not answer.done(), "nobody has looked into its inbox"
        await node.start()
        await asyncio.wait_for(answer, 30)
        await node.stop(drain_s=0)

    asyncio.run(scene())
