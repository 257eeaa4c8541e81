"""A request body of JSON lines, each read when it arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvrelay.errors import InvalidRequest
from router.arriving.parts import PromptPart
from router.http.bodies import TokenIds, invalid_fields
from router.http.json_body import json_object


class PartBody(BaseModel):
    """`offset`: characters or tokens of the prompt that go before it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    token_ids: TokenIds | None = None
    offset: int | None = None

    def part(self) -> PromptPart:
        """Raises InvalidRequest."""
        if (self.text is None) == (self.token_ids is None):
            raise InvalidRequest("a line needs either text or token_ids", param="text")
        if self.offset is not None and self.offset < 0:
            raise InvalidRequest(f"offset must be at least 0, not {self.offset}", param="offset")
        content = tuple(self.token_ids or ()) if self.text is None else self.text
        return PromptPart(content=content, offset=self.offset)


async def json_lines(
    chunks: AsyncIterator[bytes], most_bytes: int
) -> AsyncGenerator[dict[str, Any]]:
    """Each line's object; empty lines are left out. Raises InvalidRequest, also for a line of more
    than `most_bytes`."""
    rest = bytearray()
    async for chunk in chunks:
        *lines, tail = chunk.split(b"\n")
        for line in lines:
            rest += line
            if found := await _object(rest, most_bytes):
                yield found
            rest.clear()
        rest += tail
        _check(rest, most_bytes)
    if found := await _object(rest, most_bytes):
        yield found


def part_of(fields: dict[str, Any]) -> PromptPart:
    """Raises InvalidRequest."""
    try:
        return PartBody.model_validate(fields).part()
    except ValidationError as error:
        raise invalid_fields(error) from None


async def _object(line: bytearray, most_bytes: int) -> dict[str, Any] | None:
    _check(line, most_bytes)
    return await json_object(bytes(line)) if line.strip() else None


def _check(line: bytearray, most_bytes: int) -> None:
    if len(line) > most_bytes:
        raise InvalidRequest(
            f"a line exceeds the limit of {most_bytes} bytes: send it in several",
            code="line_too_large",
        )
