"""What the tests of the HTTP face share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.faces_kit import MODEL
from tests.tokenizer_fixture import byte_level

TEXT = "the earth 😀 and the heaven"
CHAT = [{"role": "user", "content": "the earth"}]


@pytest.fixture(scope="module", name="folder")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level(tmp_path_factory.mktemp("checkpoint"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.5}')
    return folder


def events(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def completion(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": MODEL, "prompt": TEXT, **body})


async def cut_off(client: httpx.AsyncClient, **body: Any) -> str:
    """What a stream said before its connection was closed without an end."""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        return (await until_cut(answer.aiter_bytes())).decode()


async def until_cut(pieces: AsyncIterator[bytes]) -> bytes:
    said = b""
    try:
        async for piece in pieces:
            said += piece
    except httpx.RemoteProtocolError:
        return said
    raise AssertionError("the stream has an end")


def full(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": TEXT, **body} if path == "/v1/completions" else body


def assert_error(
    answer: httpx.Response, status: int, code: str, param: str | None, words: str
) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert words in error["message"]
    assert param is None or error["param"] == param
    assert set(error) == {"message", "type", "code", "param"}
