"""Every parser of what clients send: a value, or a refusal with its reason, for any input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.load import load_config
from kvrelay.errors import ConfigError, InvalidRequest
from router.carried.promise_token import PromiseToken
from router.carried.signing import ClusterKey
from router.http.bodies import continuation_of, parsed
from router.http.json_body import check_values
from router.text.bounds import MAX_DEPTH, check_depth
from router.text.request_fields import HEADERS, objectives_of
from router.text.tokenizer import TextTokenizer
from tests.inputs.serving import TIERS
from tests.inputs.strategies import FIELDS, KINDS, anything, headers, messages, texts
from tests.tokenizer_fixture import byte_level

FIXED = settings(
    database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module", name="tokenizer")
def a_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(byte_level(tmp_path_factory.mktemp("checkpoint")))


@settings(FIXED, max_examples=100)
@given(path=st.sampled_from(sorted(KINDS)), data=st.data())
def test_any_fields(path: str, data: st.DataObject) -> None:
    kind = KINDS[path][0]
    with suppress(InvalidRequest):
        parsed(data.draw(FIELDS[path]), kind, {})
    with suppress(InvalidRequest):
        body = parsed(
            {"prompt": "a", "continuation": data.draw(anything)}, KINDS["/v1/completions"][0], {}
        )
        continuation_of(body)  # type: ignore[arg-type]


@settings(FIXED, max_examples=100)
@given(given_headers=headers, asked=texts)
def test_any_objectives_and_tiers(given_headers: dict[bytes, bytes], asked: str) -> None:
    named = {k.decode("latin-1"): v.decode("latin-1") for k, v in given_headers.items()}
    with suppress(InvalidRequest):
        objectives_of(named, HEADERS)
    with suppress(InvalidRequest):
        assert TIERS.tier_of(asked, named) in TIERS.tiers


@settings(FIXED, max_examples=100)
@given(told=st.binary(max_size=60) | anything.map(lambda one: json.dumps(one).encode()))
def test_any_promise(told: bytes) -> None:
    """Where no secret is set, anybody can sign."""
    key = ClusterKey()
    ClusterKey(b"k").open(PromiseToken, told)
    key.open(PromiseToken, key._mac(PromiseToken, told) + told)


def test_a_promise_nested_deeply_is_none() -> None:
    key, told = ClusterKey(), b"[" * 100_000
    assert key.open(PromiseToken, key._mac(PromiseToken, told) + told) is None


@settings(FIXED, max_examples=150)
@given(chat=messages, kwargs=st.dictionaries(texts, anything, max_size=3))
def test_any_chat(
    tokenizer: TextTokenizer, chat: list[Mapping[str, Any]], kwargs: dict[str, Any]
) -> None:
    with suppress(InvalidRequest):
        rendered = tokenizer.render_chat(chat, template_kwargs=kwargs)
        tokenizer.encode(rendered)


@settings(FIXED, max_examples=100)
@given(body=st.binary(max_size=80) | anything.map(lambda one: json.dumps(one).encode()))
def test_any_bytes_are_counted(body: bytes) -> None:
    with suppress(InvalidRequest):
        check_values(body)


@settings(FIXED, max_examples=60)
@given(text=st.text(max_size=60) | anything.map(json.dumps))
def test_any_cluster_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = _file(tmp_path_factory)
    path.write_text(text, encoding="utf-8", errors="replace")
    with suppress(ConfigError):
        load_config(path)


@settings(FIXED, max_examples=60)
@given(value=anything, key=st.sampled_from(["router", "model", "workers", "engine", "kv"]))
def test_any_value_in_a_cluster_file(
    tmp_path_factory: pytest.TempPathFactory, value: object, key: str
) -> None:
    path = _file(tmp_path_factory)
    path.write_text(json.dumps({key: value}), encoding="utf-8")
    with suppress(ConfigError):
        load_config(path)


def _file(folders: pytest.TempPathFactory) -> Path:
    return folders.getbasetemp() / "any.yaml"


def test_values_are_counted_outside_of_strings() -> None:
    check_values(json.dumps({"prompt": '[{"a": 1, "\\' * 100_000}).encode())
    check_values(json.dumps({"prompt": [1] * 131_000}).encode())
    with pytest.raises(InvalidRequest, match="more than 131072 JSON values") as caught:
        check_values(json.dumps({"prompt": [1] * 132_000}).encode())
    assert caught.value.code == "too_many_values"
    with pytest.raises(InvalidRequest, match="more than 131072 JSON values"):
        check_values(json.dumps({str(i): 1 for i in range(17_000)}).encode())
    with pytest.raises(InvalidRequest, match="a number of over 40 digits"):
        check_values(b'{"seed": ' + b"7" * 41 + b"}")


def test_depth_is_counted() -> None:
    nested: object = 1
    for _ in range(MAX_DEPTH):
        nested = [nested]
    check_depth(nested, "x")
    with pytest.raises(InvalidRequest, match="x is nested over 64 deep"):
        check_depth({"a": nested}, "x")
