"""One request that runs on the workers, as the faces follow it. Lives in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvrelay.errors import RequestFailedError
from kvrelay.types import PromptLogprob
from router.events import Deliver, Fail
from router.generation import ChoiceTokens
from router.request import Request


class GenerationOwner(Protocol):
    """Whose it is: the dispatcher."""

    def runs(self, generation: WorkerGeneration) -> bool: ...

    def stop(self, request_id: str, choice: int, valid_tokens: int) -> None: ...

    def abort(self, request_id: str) -> None: ...


class WorkerGeneration:
    """A request on the workers. What it yields comes in index order, each token once."""

    def __init__(self, owner: GenerationOwner, request_id: str) -> None:
        self.request_id = request_id
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request: Request | None = None
        self.alarm: asyncio.TimerHandle | None = None  # rings when its deadline passes
        self._owner = owner
        self._deliveries: asyncio.Queue[Deliver | Fail | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[ChoiceTokens]:
        try:
            while (delivery := await self._deliveries.get()) is not None:
                if isinstance(delivery, Fail):
                    raise RequestFailedError(delivery.reason, delivery.message)
                for tokens in delivery.tokens:
                    yield tokens
                if delivery.done:
                    return
        finally:
            self.abort()

    def stop(self, choice: int, valid_tokens: int) -> None:
        if self._owner.runs(self):
            self._owner.stop(self.request_id, choice, valid_tokens)

    def abort(self) -> None:
        if self._owner.runs(self):  # the id may be another request's by now
            self._owner.abort(self.request_id)

    def ledger(self) -> dict[str, float]:
        return self.request.ledger.phases() if self.request is not None else {}

    def prediction_errors(self) -> dict[str, float]:
        return self.request.prediction_errors() if self.request is not None else {}

    @property
    def cached_tokens(self) -> int:
        return self.request.cached_tokens if self.request is not None else 0

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        return self.request.prompt_logprobs if self.request is not None else ()

    @property
    def capped_tokens(self) -> int | None:
        return self.request.capped_tokens if self.request is not None else None

    def put(self, delivery: Deliver | Fail | None) -> None:
        self._deliveries.put_nowait(delivery)
