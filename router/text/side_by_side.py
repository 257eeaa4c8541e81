"""Several prompts of one HTTP request: admitted together, and their deltas merged as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from router.text.choices import TextDelta
from router.text.generation import TextGeneration
from router.text.request import TextRequest
from router.text.service import TextService

WAITING_DELTAS = 64


async def start_all(service: TextService, requests: Sequence[TextRequest]) -> list[TextGeneration]:
    """All or none: when one is refused, the admitted ones are aborted."""
    started: list[TextGeneration] = []
    try:
        for request in requests:
            started.append(await service.start(request))
            await asyncio.sleep(0)  # others have their turn between two prompts
    except BaseException:
        for generation in started:
            generation.withdraw()
        raise
    return started


async def merged(
    generations: Sequence[TextGeneration],
) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Yields (position of the prompt, delta). Closing it early aborts all."""
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, TextDelta] | None] = asyncio.Queue(WAITING_DELTAS)
    pumps = [
        asyncio.create_task(_pump(position, generation, arrived))
        for position, generation in enumerate(generations)
    ]
    try:
        async for item in _until_all_done(arrived, pumps):
            yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for generation in generations:
            generation.abort()


async def _pump(
    position: int,
    generation: TextGeneration,
    arrived: asyncio.Queue[tuple[int, TextDelta] | None],
) -> None:
    """While nobody takes them, its tokens wait in `generation`, which bounds them."""
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                await arrived.put((position, delta))
    except Exception:
        await arrived.put(None)
        raise
    await arrived.put(None)


async def _until_all_done(
    arrived: asyncio.Queue[tuple[int, TextDelta] | None], pumps: Sequence[asyncio.Task[None]]
) -> AsyncIterator[tuple[int, TextDelta]]:
    running = len(pumps)
    while running:
        item = await arrived.get()
        if item is not None:
            yield item
            continue
        running -= 1
        for pump in pumps:
            if pump.done():
                pump.result()
