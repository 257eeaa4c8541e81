"""A stream that has nothing to say sends comments, so that no proxy cuts it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.errors import RequestFailedError
from router.http.event_stream import COMMENT, KEEP_ALIVE_S, Silence
from tests.integration.faces_kit import MODEL, in_loop, served
from tests.integration.http_kit import TEXT, events, until_cut
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder

BODY = {"model": MODEL, "prompt": TEXT, "stream": True}


def test_silence_is_counted_from_the_last_thing_said() -> None:
    silence = Silence(longest_s=KEEP_ALIVE_S, since_s=100.0)
    assert silence.left_s(100.0) == KEEP_ALIVE_S == 15.0
    assert silence.left_s(114.0) == 1.0
    silence.since_s = 114.0
    assert silence.left_s(128.0) == 1.0
    assert silence.left_s(129.5) < 0


@pytest.mark.parametrize("gate", ["first_token", "second_token"])
@in_loop
async def test_comments_come_until_the_next_token(gate: str, folder: Path) -> None:
    """Before the first one, too: they open the stream."""
    async with served(folder, keep_alive_s=0.01) as s, s.http() as client:
        s.dispatcher.gates = {gate}
        async with client.stream("POST", "/v1/completions", json=BODY) as answer:
            assert answer.status_code == 200
            pieces = answer.aiter_bytes()
            said = await _until(pieces, 3 * COMMENT)
            assert (said.count(b"data: ") == 0) == (gate == "first_token")
            for generation in [*s.dispatcher.running.values()]:
                generation.go_on.set()
            rest = said + b"".join([piece async for piece in pieces])
        told = [e for e in rest.decode().split("\n\n") if e and not e.startswith(":")]
        chunks = events("\n\n".join(told))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == TEXT
        assert chunks[-1] == "[DONE]"


async def _until(pieces: AsyncIterator[bytes], end: bytes) -> bytes:
    said = b""
    while not said.endswith(end):
        said += await anext(pieces)
    return said


@in_loop
async def test_the_openai_client_skips_them(folder: Path) -> None:
    async with served(folder, keep_alive_s=0.01) as s, s.openai() as client:
        s.dispatcher.gates = {"second_token"}
        stream = await client.completions.create(model=MODEL, prompt=TEXT, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            for generation in [*s.dispatcher.running.values()]:
                generation.go_on.set()
        assert text == TEXT


@in_loop
async def test_an_error_behind_a_comment_is_an_event(folder: Path) -> None:
    """The status line has left; without a comment the error would have a status of its own."""
    async with served(folder, keep_alive_s=0.01) as s, s.http() as client:
        s.dispatcher.failure = RequestFailedError("worker_lost", "gone")
        s.dispatcher.fail_after_tokens = 0
        s.dispatcher.gates = {"first_token"}
        async with client.stream("POST", "/v1/completions", json=BODY) as answer:
            pieces = answer.aiter_bytes()
            said = await _until(pieces, COMMENT)
            for generation in [*s.dispatcher.running.values()]:
                generation.go_on.set()
            rest = said + await until_cut(pieces)
        assert answer.status_code == 200
        assert b"worker_lost" in rest
