"""A router that serves in a thread of its own, over the in-memory dispatcher."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from kvrelay.qos import QosTier, QosTiers
from router.core.state.generation import GenerationRequest
from router.text.request_fields import TierMatch, TierRules
from tests.integration.faces_kit import Served, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

TIERS = TierRules(
    tiers=QosTiers(tiers=(QosTier(name="premium"), QosTier(name="free")), default="free"),
    match=TierMatch(values={"gold": "premium"}),
)


def echo_and_more(request: GenerationRequest, choice: int) -> list[int]:
    return [*request.prompt_ids[1:], 7]


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Its dispatcher says each prompt again, and one token more."""
    ready: list[Served] = []
    loop, ended = uvloop.new_event_loop(), asyncio.Event()
    is_up = threading.Event()

    async def serve() -> None:
        byte_level(folder)
        async with served(folder, FakeDispatcher(script=echo_and_more), tiers=TIERS) as server:
            ready.append(server)
            is_up.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(30)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
