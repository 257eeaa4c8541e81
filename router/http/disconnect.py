"""Work that a client's disconnect cancels, at whatever moment it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def _disconnected(receive: Receive) -> None:
    """The body has been read: whatever else comes before the disconnect is of no interest."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Returns when `work` has ended, finished or cancelled; raises what it raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()
