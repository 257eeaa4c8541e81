"""Prompts that a real decode worker computes itself: the same tokens, and nothing handed over."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Role
from router.core.policy.choice import Policies
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 40
SLOW: dict[str, Any] = {
    "prefill_overhead_s": 30.0,
    "prefill_token_s": 0.0,
    "prefill_pair_s": 0.0,
    "decode_knots": [[64, 0.001]],
    "decode_kv_token_s": 0.0,
}
"""What the prefill worker says of itself, so that it has nothing to do."""


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def _ask(cluster: Cluster, prompt: list[int], **fields: Any) -> dict[str, Any]:
    plain = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return cluster.completion(prompt, **{**plain, **fields})


def _tokens(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def _local_prefills(cluster: Cluster) -> float:
    lines = cluster.metrics().splitlines()
    (line,) = [one for one in lines if one.startswith("kvrelay:local_prefills_total{")]
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_a_decode_worker_computes_is_exact_and_finds_what_it_has(
    family: str, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """A conversation, of which it has all but some tokens, beside others in mid-stream; and prompts
    that part from it within a block."""
    folder = random_checkpoint(tmp_path / family, family)
    profile = tmp_path / "slow.yaml"
    profile.write_text(yaml.safe_dump(SLOW))
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")

    def check(prompt: list[int], tokens: list[int]) -> None:
        assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), tokens)

    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, folder, profile=str(profile))),
        (hosts[1], worker_settings("decode-0", Role.DECODE, folder, mixed_chunk_tokens=32)),
    ]
    with (
        running_cluster(folder, workers, policies=Policies(local_prefill=True)) as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        prompt, found = _prompt(1, 150), []
        for turn in range(3):
            others = [_prompt(100 * (turn + 1) + i, 70 + 9 * i) for i in range(2)]
            beside = [pool.submit(_ask, cluster, other) for other in others]
            answer = _ask(cluster, prompt)
            check(prompt, _tokens(answer))
            for other, ended in zip(others, beside, strict=True):
                check(other, _tokens(ended.result()))
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            prompt = [*prompt, *_tokens(answer), *_prompt(turn + 2, 30)]
        # All of it has KV but the last token that was drawn; whole blocks are found.
        computed = (150 + TOKENS - 1, 150 + 2 * TOKENS + 30 - 1)
        assert found == [0, *(tokens // 16 * 16 for tokens in computed)]
        parted = [*prompt[:101], *_prompt(9, 20)]
        answer = _ask(cluster, parted)
        check(parted, _tokens(answer))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        two = _ask(cluster, parted, n=2)
        assert [one["token_ids"] for one in two["choices"]] == 2 * [_tokens(answer)]
        assert _local_prefills(cluster) == 3 * 3 + 2
        cluster.assert_clean()


def test_its_ledger_says_who_computed_it(
    llama: Path, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    profile = tmp_path / "slow.yaml"
    profile.write_text(yaml.safe_dump(SLOW))
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, llama, profile=str(profile))),
        (hosts[1], worker_settings("decode-0", Role.DECODE, llama)),
    ]
    body = {"model": "test-model", "prompt": _prompt(1, 50), "max_tokens": 4}
    with running_cluster(llama, workers, policies=Policies(local_prefill=True)) as cluster:
        headers = {"x-kvrelay-ledger": "1"}
        answer = cluster.http.post("/v1/completions", json=body, headers=headers).json()
        phases = answer["kvrelay"]["ledger_ms"]
        assert phases["local_prefill"] > 0
        assert not {"prefill", "dispatch", "handoff", "decode_queue"} & set(phases)


def test_decode_workers_alone_are_ready_and_serve(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    workers = [(hosts[1], worker_settings("decode-0", Role.DECODE, llama))]
    with running_cluster(llama, workers, policies=Policies(local_prefill=True)) as cluster:
        assert cluster.http.get("/ready").status_code == 200
        assert len(_tokens(_ask(cluster, _prompt(1, 50), max_tokens=4))) == 4
    with running_cluster(llama, workers, policies=Policies()) as cluster:
        refused = cluster.http.get("/ready")
        assert (refused.status_code, refused.json()["reason"]) == (
            503,
            "no prefill worker has joined yet",
        )
