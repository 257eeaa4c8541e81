"""A worker's copies from pool nodes: one that hangs holds up none of the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

import pytest
import torch

from cluster.worker.pool import links as module
from cluster.worker.pool.links import FAREWELL_S, PoolLinks
from kvpool.core.fetch.client_events import BlocksFetched, CloseNode, ConnectNode, FetchBlocks
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.memory.host import checksums
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import Read
from kvrelay.types import Incarnation

BLOCKS = 8
LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=4),)),),
    dtype="float32",
    block_size=16,
)
BYTES = LAYOUT.bytes_per_block
SLOW, QUICK = Incarnation("slow"), Incarnation("quick")


class NodeOnPaper:
    """A link to a node whose blocks are all ones, and its connection, which may hang."""

    def __init__(self, node: Incarnation) -> None:
        self.node = node
        self.asked = threading.Event()
        self.goes_on = threading.Event()
        if node != SLOW:
            self.goes_on.set()

    def start(self) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...

    def connection(self) -> NodeOnPaper:
        return self

    def window(self, region: str) -> None: ...

    def read_many(self, reads: Sequence[Read]) -> None:
        self.asked.set()
        assert self.goes_on.wait(60)
        for read in reads:
            read.target.fill_(1)


@contextmanager
def linked(
    monkeypatch: pytest.MonkeyPatch, *nodes: Incarnation
) -> Iterator[tuple[PoolLinks, dict[Incarnation, NodeOnPaper], queue.SimpleQueue[object]]]:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    papers = {node: NodeOnPaper(node) for node in nodes}
    links = PoolLinks(
        KvMemory(LAYOUT, BLOCKS, "cpu"),
        address=f"shm:nobody-{uuid4().hex[:8]}",
        incarnation=Incarnation(uuid4().hex),
        fingerprint="5a" * 16,
        looks_up=True,
        post=inbox.put,
        crashed=inbox.put,
    )
    monkeypatch.setattr(module, "PoolLink", lambda *rest: papers[rest[-1]])
    for node in nodes:
        links.execute(ConnectNode(node=node, addresses=("far:1",)))
    try:
        yield links, papers, inbox
    finally:
        for paper in papers.values():
            paper.goes_on.set()
        links.close()


def fetch(node: Incarnation, number: int) -> FetchBlocks:
    ones = torch.ones(1, BYTES, dtype=torch.uint8)
    return FetchBlocks(
        node=node,
        request_no=number,
        region="theirs",
        places=(PoolPlace(0),),
        checksums=checksums(ones),
        targets=((BlockId(number),),),
    )


def fetched(inbox: queue.SimpleQueue[object]) -> tuple[Incarnation, int, int]:
    event = inbox.get(timeout=60)
    assert isinstance(event, BlocksFetched), event
    return event.node, event.request_no, event.sound_blocks


def test_a_node_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(monkeypatch, SLOW, QUICK) as (links, papers, inbox):
        links.execute(fetch(SLOW, 1))
        assert papers[SLOW].asked.wait(60)
        links.execute(fetch(SLOW, 2))
        links.execute(fetch(QUICK, 3))
        assert fetched(inbox) == (QUICK, 3, 1)
        assert inbox.empty()
        papers[SLOW].goes_on.set()
        assert [fetched(inbox), fetched(inbox)] == [(SLOW, 1, 1), (SLOW, 2, 1)]


def test_jobs_of_a_node_that_is_given_up_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks are held until then."""
    with linked(monkeypatch, SLOW) as (links, papers, inbox):
        links.execute(fetch(SLOW, 1))
        assert papers[SLOW].asked.wait(60)
        links.execute(fetch(SLOW, 2))
        links.execute(CloseNode(node=SLOW))
        papers[SLOW].goes_on.set()
        assert [fetched(inbox), fetched(inbox)] == [(SLOW, 1, 1), (SLOW, 2, 1)]


def test_the_end_does_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(monkeypatch, SLOW) as (links, papers, inbox):
        links.execute(fetch(SLOW, 1))
        assert papers[SLOW].asked.wait(60)
        links.execute(fetch(SLOW, 2))
        began_s = time.monotonic()
        links.close()
        assert time.monotonic() - began_s < FAREWELL_S + 10
        papers[SLOW].goes_on.set()
        assert fetched(inbox) == (SLOW, 1, 1)
        threads = [one for one in threading.enumerate() if one.name == "kvrelay-pool"]
        for thread in threads:
            thread.join(60)
        assert inbox.empty(), "what had not begun is dropped"
