"""Computes what has come of a prompt, block by block, while the rest is on its way.

It runs ordinary requests that want no token, one at a time, each for all whole blocks so far. Their
KV stays in the workers' caches, where the prompt itself will find it. So nothing is held for a
prompt whose client says nothing, and a worker that dies takes no more with it than a cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from kvrelay.errors import InvalidRequest, Refused, RequestFailedError
from router.arriving.pieces import PROMPT_ONLY, REFUSED_S, SETTLE_S, next_tokens
from router.arriving.stable_tokens import StableTokens
from router.core.state.generation import Generation, GenerationRequest
from router.text.request import TextRequest
from router.text.service import TextService

log = logging.getLogger(__name__)

LEAST_CHARACTERS = 256
"""So much new text is worth a look."""


class Ahead:
    """Lives in the router's event loop. `computed_tokens`: of the prompt, so far."""

    def __init__(self, service: TextService, request: TextRequest) -> None:
        self.computed_tokens = 0
        self._service = service
        self._request = request
        self._text = StableTokens(
            service.tokenizer.backend, add_special_tokens=request.add_special_tokens
        )
        self._ids: tuple[int, ...] = ()  # known so far
        self._pending: list[str] = []
        self._arrived = asyncio.Event()
        self._running: Generation | None = None
        self._asked = 0
        self._closing = False
        self._task = asyncio.ensure_future(self._run())

    def add(self, content: str | tuple[int, ...]) -> None:
        if isinstance(content, str):
            self._pending.append(content)
        else:
            self._ids += content
        self._arrived.set()

    async def settle(self) -> None:
        """Begins nothing more; what runs may finish for a moment."""
        self._closing = True
        self._arrived.set()
        if self._running is not None:
            await asyncio.wait({self._task}, timeout=SETTLE_S)
        await self.close()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while not self._closing:
            await self._arrived.wait()
            self._arrived.clear()
            await self._tokenize()
            while not self._closing and (tokens := self._next_tokens()):
                await self._compute(tokens)

    async def _tokenize(self) -> None:
        if sum(map(len, self._pending)) < LEAST_CHARACTERS:
            return
        text = "".join(self._pending)
        self._pending.clear()
        await asyncio.to_thread(self._text.grow, text)
        self._ids = self._text.stable_ids()

    def _next_tokens(self) -> int:
        """How far the next request goes; 0: not enough has come."""
        block = self._service.dispatcher.block_size()
        return next_tokens(len(self._ids), self.computed_tokens, block)

    async def _compute(self, tokens: int) -> None:
        self._asked += 1
        asked = replace(self._asking(), prompt_ids=self._ids[:tokens])
        booking = self._request.booking
        assert booking is not None, "begun when its first part came"
        try:
            booking.pay(tokens, time.monotonic())
            self._running = await self._service.dispatcher.submit(asked)
            async for _ in self._running:
                pass
            self._service.metrics.prompt_tokens_ahead.inc(tokens - self.computed_tokens)
            self.computed_tokens = booking.computed_tokens = tokens
        except Refused as refused:
            log.debug("not ahead: %s", refused.message, extra=self._log_id)
            await asyncio.sleep(refused.retry_after_s or REFUSED_S)
        except (RequestFailedError, InvalidRequest) as error:
            log.debug("not ahead: %s", error.message, extra=self._log_id)
            await asyncio.sleep(REFUSED_S)
        finally:
            running, self._running = self._running, None
            if running is not None:
                running.abort()

    def _asking(self) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{self._request.own_id}-ahead-{self._asked}",
            prompt_ids=(),
            sampling=PROMPT_ONLY,
            tenant=self._request.tenant,
            qos_tier=self._request.tier,
            is_ahead=True,
        )

    @property
    def _log_id(self) -> dict[str, str]:
        return {"request_id": self._request.request_id}
