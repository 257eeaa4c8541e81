"""The parts of a prompt that is sent while it comes into being, for the client.

They are kept until the request has ended: when its router is gone, the next one gets all of them
again, and then those that are still to come.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

from kvrelay.errors import InvalidRequest
from kvrelay.v1 import inference_pb2 as pb

TextOrIds = str | Sequence[int]


class KeptParts:
    """`error` is what the user's own parts have raised; `is_whole` once the last one has come."""

    def __init__(self, request: pb.GenerateRequest, expected_tokens: int) -> None:
        self.error: BaseException | None = None
        self.is_whole = False
        self._messages = [pb.PromptPart(request=request, expected_tokens=expected_tokens)]
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._length = 0  # characters or tokens

    def renew(self, request: pb.GenerateRequest) -> None:
        """What is left of its deadline, and what a refusal has promised."""
        self._messages[0].request.CopyFrom(request)

    def complete(self, request: pb.GenerateRequest) -> None:
        """The whole prompt becomes the input of the request."""
        if self._ids:
            request.tokenized.input_ids[:] = self._ids
        else:
            request.text = "".join(self._texts)

    def add(self, part: TextOrIds) -> None:
        message = pb.PromptPart(offset=self._length)
        if isinstance(part, str):
            message.text = part
            self._texts.append(part)
        else:
            message.tokenized.input_ids.extend(part)
            self._ids += part
        self._length += len(part)
        self._messages.append(message)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, TypeError | ValueError):
            error = InvalidRequest(f"a part has the wrong type or range: {error}", param="prompt")
        self.error = error

    def known(self, at: int) -> pb.PromptPart | None:
        return self._messages[at] if at < len(self._messages) else None


class Parts(KeptParts):
    """Iterated again for each router, maybe by two threads at once: one may still wait for the
    next part while its call is over."""

    def __init__(
        self, request: pb.GenerateRequest, parts: Iterable[TextOrIds], expected_tokens: int
    ) -> None:
        super().__init__(request, expected_tokens)
        self._coming = iter(parts)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[pb.PromptPart]:
        at = 0
        while (message := self._message(at)) is not None:
            yield message
            at += 1

    def _message(self, at: int) -> pb.PromptPart | None:
        with self._lock:
            if self.known(at) is None and not self.is_whole:
                self._take()
            return self.known(at)

    def _take(self) -> None:
        try:
            self.add(next(self._coming))
        except StopIteration:
            self.is_whole = True
        except BaseException as error:
            self.fail(error)
            raise


class AsyncParts(KeptParts):
    """The same in an event loop."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        parts: AsyncIterable[TextOrIds] | Iterable[TextOrIds],
        expected_tokens: int,
    ) -> None:
        super().__init__(request, expected_tokens)
        self._coming = aiter(parts) if isinstance(parts, AsyncIterable) else _each(parts)
        self._lock = asyncio.Lock()

    async def __aiter__(self) -> AsyncIterator[pb.PromptPart]:
        at = 0
        while (message := await self._message(at)) is not None:
            yield message
            at += 1

    async def _message(self, at: int) -> pb.PromptPart | None:
        async with self._lock:
            if self.known(at) is None and not self.is_whole:
                await self._take()
            return self.known(at)

    async def _take(self) -> None:
        try:
            self.add(await anext(self._coming))
        except StopAsyncIteration:
            self.is_whole = True
        except Exception as error:
            self.fail(error)
            raise


async def _each(parts: Iterable[TextOrIds]) -> AsyncIterator[TextOrIds]:
    for part in parts:
        yield part
