"""Prefixes that are found again in a real split cluster: the same tokens, less work."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay import Client
from kvrelay.types import Role
from router.text.preload import PreloadText, preload_specs
from router.text.tokenizer import TextTokenizer
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 40


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def _ask(cluster: Cluster, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """Its tokens, and how many prompt tokens were found cached."""
    plain = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = cluster.completion(prompt, **{**plain, **fields})
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_turns_of_a_conversation_are_exact_and_find_what_came_before(
    family: str, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """The second turn's prompt holds the first one's prompt and answer."""
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, folder)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, folder)),
    ]
    with running_cluster(folder, workers) as cluster:
        prompt, found = _prompt(1, 150), []
        for turn in range(3):
            tokens, cached = _ask(cluster, prompt)
            assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), tokens)
            found.append(cached)
            prompt = [*prompt, *tokens, *_prompt(turn + 2, 30)]
        # Whole blocks: of prompt and answer, which is at decode, for pulling has not been timed
        # yet; then the last prompt, or blocks of the answer too if that is found to be faster.
        assert found[:2] == [0, 176] and found[2] in (208, 256)
        _assert_sent_less(cluster, computed=150 + 220 + 290)
        cluster.assert_clean()


def _assert_sent_less(cluster: Cluster, *, computed: int) -> None:
    """The decode worker says what it has; that is not sent again."""
    metrics = cluster.metrics()
    hits = _value(metrics, "kvrelay:prefix_cache_hits_total", "decode-0")
    assert 150 + 40 <= hits < computed
    assert _value(metrics, "kvrelay:prefix_cache_hits_total", "prefill-0") == 144 + 208


def _value(metrics: str, name: str, worker: str) -> float:
    (line,) = [
        line
        for line in metrics.splitlines()
        if line.startswith(f"{name}{{") and f'"{worker}"' in line
    ]
    return float(line.rsplit(" ", 1)[1])


def test_choices_and_neighbours_that_share_a_prefix_are_exact(split: Cluster, llama: Path) -> None:
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    shared = _prompt(7, 96)
    for tail in range(4):
        prompt = [*shared, *_prompt(100 + tail, 5)]
        answer = split.completion(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, n=2)
        expected = generate_reference(model, prompt, tokens=TOKENS)
        for choice in answer["choices"]:
            assert_same_tokens(expected, choice["token_ids"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    split.assert_clean()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_prompts_that_part_within_a_block_are_exact_and_share_whole_blocks(
    family: str, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, folder)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, folder)),
    ]
    whole, found = _prompt(1, 150), []
    with running_cluster(folder, workers) as cluster:
        for shared, own in ((150, 0), (107, 20), (101, 64), (9, 70), (150, 0), (144, 0)):
            prompt = [*whole[:shared], *_prompt(shared, own)]
            tokens, cached = _ask(cluster, prompt)
            assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), tokens)
            found.append(cached)
        assert found == [0, 96, 96, 0, 144, 128]
        cluster.assert_clean()


def test_tenants_and_salts_share_nothing(split: Cluster) -> None:
    prompt = _prompt(8, 70)
    assert _ask(split, prompt)[1] == 0
    assert _ask(split, prompt)[1] == 64
    assert _ask(split, prompt, cache_salt="a")[1] == 0
    with Client(split.grpc_address) as client:
        asked = [
            client.generate(prompt, max_tokens=2, tenant=tenant, ignore_eos=True)
            for tenant in ("a", "b", "b")
        ]
    assert [one.cached_tokens for one in asked] == [64, 0, 64]


def test_preloaded_prompts_are_found_by_the_first_request(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 6
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, llama)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, llama)),
    ]
    preload = (PreloadText(text=text, is_system=False),)
    (spec,) = preload_specs(preload, TextTokenizer.load(llama))
    tokens = len(spec.prompt_ids)
    with running_cluster(llama, workers, preload=preload) as cluster:

        def pinned() -> bool:
            (worker,) = [w for w in cluster.kv() if w["worker"] == "prefill-0"]
            return any(held["holder"].startswith("pinned") for held in worker["held"])

        wait_until(pinned, "the prompt is preloaded")
        answer = cluster.completion(f"{text} and more", max_tokens=2)
        details = answer["usage"]["prompt_tokens_details"]
        assert 0 < tokens - 32 <= details["cached_tokens"] <= tokens
