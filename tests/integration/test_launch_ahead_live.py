"""Workers that launch decode steps and chunks of prompts ahead answer what others answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvrelay.types import Role
from tests.integration.split_kit import WorkerHost, running_cluster, worker_settings
from tests.integration.test_handoff_exact import prompts
from tests.models import random_checkpoint

TOKENS = 48
CHUNKS = {"prefill_chunk_tokens": 16}
"""Most prompts have several."""


def bodies() -> list[dict[str, Any]]:
    """Of all kinds. With their seeds no draw is so close that the order of summation, which depends
    on what a prompt is computed with, decides it."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "n": 2},
        {"temperature": 0, "stop": ["a", "e"]},
        {"temperature": 1.0, "seed": 9, "stop_token_ids": list(range(2, 512, 20))},
        {"temperature": 0, "ignore_eos": True, "min_tokens": 20},
        {"temperature": 0, "repetition_penalty": 1.2},
    ]
    asked = prompts([3 + 11 * i for i in range(2 * len(kinds))])
    return [{"prompt": p, "max_tokens": TOKENS, **kinds[i // 2]} for i, p in enumerate(asked)]


def choices(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    wanted = ("index", "token_ids", "text", "finish_reason", "stop_reason")
    return [tuple(choice.get(name) for name in wanted) for choice in answer["choices"]]


def test_answers_are_the_same(hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "llama", "llama")
    found = {}
    for mode in ("off", "on"):
        changes: dict[str, Any] = {"launch_ahead": mode}
        workers = [
            (hosts[0], worker_settings("prefill-0", Role.PREFILL, model, **changes, **CHUNKS)),
            (hosts[1], worker_settings("decode-0", Role.DECODE, model, **changes)),
        ]
        with running_cluster(model, workers) as cluster, ThreadPoolExecutor(6) as pool:

            def ask(body: dict[str, Any]) -> list[tuple[Any, ...]]:
                return choices(cluster.completion(**body))

            found[mode] = list(pool.map(ask, bodies()))
    assert found["on"] == found["off"]
    reasons = {choice[3] for answer in found["on"] for choice in answer}
    assert reasons == {"stop", "length"}
