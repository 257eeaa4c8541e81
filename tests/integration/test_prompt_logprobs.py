"""Log probabilities of prompts, over a real split cluster: those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from engine.model.model import Model
from kvrelay import Client
from kvrelay.types import PromptLogprob, Role
from router.core.policy.choice import Policies
from router.text.tokenizer import TextTokenizer
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

WITHIN = 2e-4
LOGLIKELIHOOD = {"temperature": 0, "max_tokens": 0, "logprobs": 1, "seed": 1234, "echo": True}
"""lm-eval's request, but for what it generates."""


@pytest.fixture(scope="module", name="model")
def reference_model(llama: Path) -> Model:
    return load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")


@pytest.fixture(scope="module", name="tokenizer")
def checkpoint_tokenizer(llama: Path) -> TextTokenizer:
    return TextTokenizer.load(llama)


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def _expected(model: Model, prompt: Sequence[int]) -> torch.Tensor:
    """`[tokens - 1, vocab]`: row i tells of token i + 1."""
    logits = model.eager_logits(torch.tensor([list(prompt)]))[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def _assert_legacy(
    model: Model, prompt: Sequence[int], logprobs: dict[str, Any], top: int, echoed: int
) -> None:
    """OpenAI's shape, of which the first `echoed` tokens are the prompt's."""
    assert echoed == len(prompt)
    rows = _expected(model, prompt)
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) >= echoed
    for row, token, own, best in zip(
        rows,
        prompt[1:],
        logprobs["token_logprobs"][1:echoed],
        logprobs["top_logprobs"][1:echoed],
        strict=True,
    ):
        assert isclose(own, float(row[token]), abs_tol=WITHIN)
        assert top <= len(best) <= top + 1
        assert isclose(max(best.values()), float(row.max()), abs_tol=WITHIN)
    _assert_offsets(logprobs["text_offset"], logprobs["tokens"])


def _assert_offsets(offsets: list[int], tokens: list[str]) -> None:
    """Half a character is told as its bytes, and counts as U+FFFD."""
    texts = [
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")).decode(errors="replace")
        if token.startswith("bytes:")
        else token
        for token in tokens
    ]
    assert offsets[0] == 0
    assert [b - a for a, b in pairwise(offsets)] == [len(text) for text in texts[:-1]]


def _assert_vllm(
    model: Model, prompt: Sequence[int], entries: list[dict[str, Any] | None], top: int
) -> None:
    """vLLM's `prompt_logprobs`."""
    assert entries[0] is None and len(entries) == len(prompt)
    for row, token, entry in zip(_expected(model, prompt), prompt[1:], entries[1:], strict=True):
        assert entry is not None and top <= len(entry) <= top + 1
        assert isclose(entry[str(token)]["logprob"], float(row[token]), abs_tol=WITHIN)
        above = int((row > row[token] + WITHIN).sum()), int((row >= row[token] - WITHIN).sum())
        assert above[0] < entry[str(token)]["rank"] <= above[1]
        best = [e for _, e in sorted(entry.items(), key=lambda item: item[1]["rank"])][:top]
        values = [e["logprob"] for e in best]
        assert torch.allclose(torch.tensor(values), row.topk(top).values, atol=WITHIN)


@pytest.mark.parametrize("tokens", [1, 2, 16, 63, 64, 65, 150])
def test_a_prompt_is_scored_without_any_output(split: Cluster, model: Model, tokens: int) -> None:
    """In one chunk or several, of 64 tokens. No decode worker takes part."""
    prompt, before = _prompt(tokens, tokens), _decoded(split)
    answer = split.completion(prompt, **LOGLIKELIHOOD)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
    assert answer["usage"]["completion_tokens"] == 0
    _assert_legacy(model, prompt, choice["logprobs"], top=1, echoed=tokens)
    assert len(choice["logprobs"]["tokens"]) == tokens
    assert _decoded(split) == before


def _decoded(cluster: Cluster) -> int:
    (worker,) = [w for w in cluster.router.workers() if w.role == "decode"]
    return worker.counters.steps


def test_what_is_cached_is_computed_again(split: Cluster, model: Model) -> None:
    """Its logits are wanted. Who asks for none still finds it."""
    prompt = _prompt(7, 100)
    split.completion(prompt, max_tokens=1)
    for _ in range(2):
        answer = split.completion(prompt, **LOGLIKELIHOOD)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        _assert_legacy(model, prompt, answer["choices"][0]["logprobs"], top=1, echoed=100)
    after = split.completion(prompt, max_tokens=1)
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96


def test_the_answer_goes_on_behind_the_echoed_prompt(
    split: Cluster, model: Model, tokenizer: TextTokenizer
) -> None:
    prompt = _prompt(8, 130)
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "n": 2}
    answer = split.completion(prompt, echo=True, logprobs=3, prompt_logprobs=2, **fields)
    expected = generate_reference(model, prompt, tokens=8)
    for choice in answer["choices"]:
        assert_same_tokens(expected, choice["token_ids"])
        _assert_legacy(model, prompt, choice["logprobs"], top=3, echoed=130)
        _assert_vllm(model, prompt, choice["prompt_logprobs"], top=2)
        assert len(choice["logprobs"]["tokens"]) == 138
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert choice["text"].startswith(text) and len(choice["text"]) > len(text)
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_streamed_it_comes_with_the_first_chunk_of_each_choice(
    split: Cluster, model: Model, max_tokens: int
) -> None:
    prompt = _prompt(9, 90)
    body = {
        **LOGLIKELIHOOD,
        "model": "test-model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "n": 2,
        "stream": True,
    }
    lines = split.http.post("/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        _assert_legacy(model, prompt, own[0]["logprobs"], top=1, echoed=90)
        tokens = [token for one in own for token in one["logprobs"]["tokens"]]
        offsets = [offset for one in own for offset in one["logprobs"]["text_offset"]]
        assert len(tokens) == 90 + max_tokens
        _assert_offsets(offsets, tokens)
        assert own[-1]["finish_reason"] == "length"


def test_lm_evals_request_is_answered_as_it_reads_it(
    split: Cluster, model: Model, tokenizer: TextTokenizer
) -> None:
    """A batch as token ids, then as text; with no output, and with the token that it drops."""
    texts = ["in the beginning was the word", "and the earth was without form, and void"]
    batch = [list(tokenizer.encode(text)) for text in texts]
    for prompts in (batch, texts):
        for max_tokens in (0, 1):
            fields = {**LOGLIKELIHOOD, "max_tokens": max_tokens}
            answer = split.completion(prompts, **fields)  # type: ignore[arg-type]
            choices = sorted(answer["choices"], key=lambda one: one["index"])
            for ids, choice in zip(batch, choices, strict=True):
                assert choice["prompt_token_ids"] == ids
                _assert_loglikelihood(model, ids, 3, choice["logprobs"], max_tokens)
            if prompts is texts and not max_tokens:
                assert [choice["text"] for choice in choices] == texts


def test_a_batch_of_more_prompts_than_there_are_places(split: Cluster, model: Model) -> None:
    """Only the prefill worker has them, one after the other."""
    batch = [_prompt(100 + i, 20 + i) for i in range(40)]
    answer = split.completion(batch, **LOGLIKELIHOOD)  # type: ignore[arg-type]
    for prompt, choice in zip(batch, answer["choices"], strict=True):
        _assert_legacy(model, prompt, choice["logprobs"], top=1, echoed=len(prompt))


def _assert_loglikelihood(
    model: Model, ids: list[int], context: int, logprobs: dict[str, Any], dropped: int
) -> None:
    """As lm-eval sums it: of the tokens behind the context, and whether each is the likeliest."""
    own = logprobs["token_logprobs"][context : len(logprobs["token_logprobs"]) - dropped]
    best = logprobs["top_logprobs"][context : len(logprobs["token_logprobs"]) - dropped]
    rows = _expected(model, ids)[context - 1 :]
    total = sum(float(row[token]) for row, token in zip(rows, ids[context:], strict=True))
    assert isclose(sum(own), total, abs_tol=WITHIN * len(ids))
    is_greedy = all(p == max(tops.values()) for p, tops in zip(own, best, strict=True))
    assert is_greedy == all(
        int(row.argmax()) == token for row, token in zip(rows, ids[context:], strict=True)
    )


def test_a_chat_has_them_too(split: Cluster, model: Model) -> None:
    body = {
        "messages": [{"role": "user", "content": "the earth"}],
        "max_tokens": 2,
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }
    answer = split.http.post("/v1/chat/completions", json=body).json()
    _assert_vllm(model, answer["prompt_token_ids"], answer["prompt_logprobs"], top=1)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_grpc_tells_them_with_the_first_message(
    split: Cluster, model: Model, max_tokens: int
) -> None:
    prompt = _prompt(11, 70)
    with Client(split.grpc_address) as client:
        whole = client.generate(prompt, prompt_logprobs=2, max_tokens=max_tokens, ignore_eos=True)
    rows = _expected(model, prompt)
    assert len(whole.choices[0].token_ids) == max_tokens
    assert len(whole.prompt_logprobs) == 69
    for row, token, entry in zip(rows, prompt[1:], whole.prompt_logprobs, strict=True):
        _assert_entry(row, token, entry)


def _assert_entry(row: torch.Tensor, token: int, entry: PromptLogprob) -> None:
    assert entry.token_id == token
    assert isclose(entry.logprob, float(row[token]), abs_tol=WITHIN)
    values = torch.tensor([value for _, value in entry.top])
    assert torch.allclose(values, row.topk(2).values, atol=WITHIN)


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
def test_a_worker_that_decodes_scores_the_prompts_that_it_computes(
    role: Role, model: Model, llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """In chunks, beside sequences that decode."""
    workers = [(hosts[0], worker_settings(f"{role}-0", role, llama))]
    alone = Policies(local_prefill=True)
    with running_cluster(llama, workers, policies=alone) as cluster:
        for tokens in (1, 64, 150):
            prompt = _prompt(tokens, tokens)
            answer = cluster.completion(prompt, **LOGLIKELIHOOD)
            _assert_legacy(model, prompt, answer["choices"][0]["logprobs"], top=1, echoed=tokens)
            fields = {**LOGLIKELIHOOD, "max_tokens": 5, "ignore_eos": True}
            answer = cluster.completion(prompt, **fields)
            _assert_legacy(model, prompt, answer["choices"][0]["logprobs"], top=1, echoed=tokens)
            expected = generate_reference(model, prompt, tokens=5)
            assert_same_tokens(expected, answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("family", ["gemma3_text", "phi3_longrope"])
def test_windows_and_long_rotaries_score_alike(
    family: str, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, folder)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, folder)),
    ]
    with running_cluster(folder, workers) as cluster:
        batch = [_prompt(seed, tokens) for seed, tokens in enumerate((20, 150))]
        answer = cluster.completion(batch, **LOGLIKELIHOOD)  # type: ignore[arg-type]
        for prompt, choice in zip(batch, answer["choices"], strict=True):
            _assert_legacy(model, prompt, choice["logprobs"], top=1, echoed=len(prompt))
