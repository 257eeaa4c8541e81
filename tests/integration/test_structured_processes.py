"""Structured output of real processes: valid, and the same text when one of them is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvrelay import Client, InvalidRequest
from kvrelay.client.options import GenerateOptions
from tests.integration.plain_kit import (
    KVRELAY,
    ChunkList,
    Process,
    RouterAddresses,
    start_router,
)
from tests.integration.plain_kit import here as here
from tests.integration.ray_head import NOTHING_BUILT, Marked, until

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 30, "maxLength": 60},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 150},
            "minItems": 25,
            "maxItems": 40,
        },
        "kind": {"enum": ["man", "woman", "angel"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}

DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "x"'


def asked(**options: Any) -> GenerateOptions:
    given = {"max_tokens": 900, "seed": 7, "temperature": 0.9, "json_schema": PERSON, **options}
    return GenerateOptions(**given)  # type: ignore[typeddict-item]


def joined(router: RouterAddresses) -> int:
    with Client(router.grpc, timeout_s=30) as client:
        return len(client.server_info().workers)


def is_valid(text: str) -> bool:
    return Draft202012Validator(PERSON).is_valid(json.loads(text))


def started(here: Marked, tmp_path: Path) -> tuple[list[RouterAddresses], dict[str, Process]]:
    routers = {f"router{i}": start_router(here, tmp_path / f"router{i}") for i in range(2)}
    addresses = [address for _, address in routers.values()]
    processes = {name: process for name, (process, _) in routers.items()}
    for name, role in (("prefill", "prefill"), ("decode0", "decode"), ("decode1", "decode")):
        processes[name] = _start_worker(here, addresses, name, role, tmp_path / name)
    for address in addresses:
        until(lambda at=address: joined(at) == 3)  # type: ignore[misc]
    return addresses, processes


def _start_worker(
    here: Marked, routers: list[RouterAddresses], name: str, role: str, log: Path
) -> Process:
    joins = [f"--join={router.internal}" for router in routers]
    options = ("--name", name, "--role", role, "--cpu-threads", "1")
    small = ("--set", "engine.kv_memory=16MiB", "--set", "model.dtype=float32")
    return here.start(KVRELAY, "worker", *joins, *options, *small, *NOTHING_BUILT, log=log)


@pytest.mark.long
def test_an_object_survives_whoever_is_killed(here: Marked, tmp_path: Path) -> None:
    """In the middle of it: a decode worker, then the router of its client."""
    addresses, processes = started(here, tmp_path)
    try:
        _survives(addresses, processes)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(30)


def _survives(addresses: list[RouterAddresses], processes: dict[str, Process]) -> None:
    both = [address.grpc for address in addresses]
    with Client(both, timeout_s=120) as client:
        alone = client.generate("It was", **asked())
        two = client.generate("It was", **asked(n=2))
        assert all(is_valid(choice.text) for choice in (*alone.choices, *two.choices))
        assert {choice.finish_reason for choice in two.choices} == {"stop"}

        streams = [ChunkList(client.stream("It was", **asked(n=n))) for n in (1, 2)]
        until(lambda: all(stream.tokens > 40 for stream in streams))
        processes["decode0"].kill()
        assert [stream.texts() for stream in streams] == [
            [choice.text for choice in whole.choices] for whole in (alone, two)
        ]

        streams = [ChunkList(client.stream("It was", **asked(n=n))) for n in (1, 2)]
        until(lambda: all(stream.tokens > 40 for stream in streams))
        processes["router0"].kill()
        assert [stream.ids() for stream in streams] == [
            [choice.token_ids for choice in whole.choices] for whole in (alone, two)
        ]

        with pytest.raises(InvalidRequest, match="nowhere"):
            client.generate("It was", grammar="start: nowhere")
        with pytest.raises(InvalidRequest, match="too deeply"):
            client.generate("It was", grammar=DEEP)
        assert client.generate("It was", **asked()).text == alone.text
