"""`help()` of both clients shows every option, with what it does."""

from __future__ import annotations

import pydoc
from collections.abc import Callable

import pytest

from kvrelay import AsyncClient, Client
from kvrelay.client.options import HELP, GenerateOptions, SamplingOptions

OPTIONS = SamplingOptions.__annotations__ | GenerateOptions.__annotations__
METHODS = [Client.generate, Client.stream, AsyncClient.generate, AsyncClient.stream]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_help_shows_every_option(method: Callable[..., object]) -> None:
    text = " ".join(pydoc.render_doc(method, renderer=pydoc.plaintext).split())  # type: ignore[attr-defined]
    for name, does in HELP.items():
        assert f" {name}: " in text, name
        assert f"{name}: {does}" in text, name
    assert "retries: 'int' = 0" in text and "temperature: 'float' = absent" in text
    assert "**options" not in text


def test_every_option_has_help() -> None:
    assert list(HELP) == list(OPTIONS)
