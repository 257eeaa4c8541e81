"""Every check that keeps a family with wrong tokens from being served, one family or fault each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from engine.checks.self_check import eager_reference
from engine.checks.summation_noise import noise_bound
from engine.compiled import build, recordings
from engine.core.sizing import EngineLimits
from engine.family.attention import attention as attend
from engine.family.build import load_model
from engine.family.long_check import BORDER_TOKENS, check_long_sequences, small_config
from engine.family.masks import MaskFunction, mask_difference
from engine.load import load_engine
from engine.model import capture as capturing
from engine.model import interface, kv_layout
from engine.model.capture import NotCaptured, capture
from engine.model.checkpoint import open_checkpoint
from engine.model.families import longrope_border_tokens
from engine.model.model import Model
from engine.runner import Engine
from kvrelay.errors import ModelError
from tests.families.kit import write_weights
from tests.families.walk import family_folder
from tests.models import family_config, random_checkpoint

LIMITS = EngineLimits(max_model_len=1024, prefill_chunk_tokens=64, max_running_requests=2)


def load(folder: Path, dtype: str = "float32", **options: Any) -> Engine:
    return load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype=dtype,
        block_size=16,
        blocks=64,
        limits=LIMITS,
        **{"compiled": False, "attention": "sdpa", **options},
    )


def tiny(folder: Path, family: str, **overrides: Any) -> Path:
    family_folder(folder, family, **overrides)
    write_weights(folder)
    return folder


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    return str(caught.value)


def test_a_window_that_only_the_mask_says_is_refused(tmp_path: Path) -> None:
    assert "(mask check): layer 0: in its mask token" in refused(tiny(tmp_path, "phimoe"))


def test_such_a_window_as_long_as_the_context_does_no_harm(tmp_path: Path) -> None:
    load(tiny(tmp_path, "phimoe", sliding_window=1024))


def test_a_mask_of_the_models_own_is_refused(tmp_path: Path) -> None:
    assert "(mask check): layer 0: it makes a mask of its own" in refused(tiny(tmp_path, "doge"))


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    message = refused(tiny(tmp_path, "bert", is_decoder=False))
    assert "(mask check): layer 0: in its mask token 0 sees token 1" in message


def test_a_cache_that_forgets_more_than_the_layers_say_is_refused(tmp_path: Path) -> None:
    message = refused(tiny(tmp_path, "moshi"))
    assert "(cache check): layer 0: transformers caches 40 tokens" in message


def test_a_layer_that_calls_attention_twice_is_refused(tmp_path: Path) -> None:
    message = refused(tiny(tmp_path, "diffllama"))
    assert "(single call check): layer 0 calls attention twice" in message


class Layer(torch.nn.Module):
    layer_idx = 3


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [({"indices": torch.ones(1)}, "with indices"), ({"is_causal": False}, "is not causal")],
)
def test_keywords_that_would_be_ignored_are_refused(keywords: dict[str, Any], reason: str) -> None:
    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ModelError, match=rf"keyword check\): layer 3: .*{reason}"):
        attend(Layer(), heads, heads, heads, None, **keywords)


def test_a_keyword_of_one_layer_refuses_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs, block_indices=torch.ones(1))

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    message = refused(random_checkpoint(tmp_path))
    assert "the llama family can't be served (keyword check): layer 0" in message


def test_a_forward_pass_that_fails_is_refused(tmp_path: Path) -> None:
    """xmod needs the language of each text."""
    message = refused(tiny(tmp_path, "xmod", default_language=None))
    assert "(forward check): it fails by itself: Input language unknown" in message


def test_what_only_long_sequences_show_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 100 tokens on the first one is no longer seen: nothing that 24 tokens would tell."""
    own = modeling_llama.eager_attention_forward

    def forgetful(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        if mask is not None and mask.shape[-1] > 100:
            mask = mask.clone()
            mask[..., 100:, 0] = torch.finfo(mask.dtype).min
        return own(module, query, key, value, mask, **others)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", forgetful)
    message = refused(random_checkpoint(tmp_path))
    assert "the llama family can't be served (long sequence check): paged logits" in message


def test_a_border_far_beyond_the_check_is_brought_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 700 tokens that kvrelay takes for one less."""
    folder = random_checkpoint(tmp_path, "mistral", sliding_window=700)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    check_long_sequences(model, 1024)
    own = kv_layout.Scores
    monkeypatch.setattr(
        interface,
        "Scores",
        lambda **said: own(**{**said, "window": said["window"] and said["window"] - 1}),
    )
    with pytest.raises(ModelError, match="long sequence check"):
        check_long_sequences(model, 1024)


def test_the_long_check_multiplies_with_all_bits_where_the_model_takes_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(
        open_checkpoint(str(random_checkpoint(tmp_path))), device="cpu", dtype="auto"
    )
    own, seen = Model.whole, []

    def whole(self: Model, *inputs: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return own(self, *inputs)

    monkeypatch.setattr(Model, "whole", whole)
    torch.set_float32_matmul_precision("high")
    try:
        check_long_sequences(model, 1024)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen[-4:] == ["highest"] * 4, "one of each step"


def test_the_small_copy() -> None:
    config = family_config(
        "gemma3_text",
        num_hidden_layers=6,
        layer_types=[*["sliding_attention"] * 5, "full_attention"],
        vocab_size=3000,
        pad_token_id=2999,
    )
    small = small_config(config, 1024)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.num_hidden_layers == 2
    assert small.sliding_window == BORDER_TOKENS
    assert (small.vocab_size, small.pad_token_id) == (512, 0)
    assert (small.num_attention_heads, small.head_dim) == (config.num_attention_heads, 16)
    assert (config.num_hidden_layers, config.sliding_window, config.vocab_size) == (6, 40, 3000)


def test_longrope_has_its_border_early_in_the_small_copy() -> None:
    small = small_config(family_config("phi3_longrope"), 1024)
    assert longrope_border_tokens(small) == BORDER_TOKENS


@pytest.mark.parametrize("longest", [64, 256, 257, 1024])
def test_longrope_is_served_below_its_border_too(tmp_path: Path, longest: int) -> None:
    """With 256 tokens none is longer than the border, and the short factors apply."""
    folder = random_checkpoint(tmp_path, "phi3_longrope")
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    assert model.longrope is not None and model.longrope.border_tokens == 256
    check_long_sequences(model, longest)


def test_a_window_that_is_never_reached_stays() -> None:
    assert small_config(family_config("mistral", sliding_window=4096), 1024).sliding_window == 4096


WINDOW = sliding_window_causal_mask_function(40)


@pytest.mark.parametrize(
    ("visible", "window", "same"),
    [
        (causal_mask_function, None, True),
        (causal_mask_function, 2000, True),
        (WINDOW, 40, True),
        (WINDOW, 41, False),
        (WINDOW, 39, False),
        (WINDOW, None, False),
        (causal_mask_function, 40, False),
        (chunked_causal_mask_function(256, torch.zeros(1, dtype=torch.int)), None, False),
        (lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool), None, False),
        (lambda b, h, q, k: torch.zeros(4)[q] <= k, None, False),
    ],
)
def test_masks_and_calls_are_compared(
    visible: MaskFunction, window: int | None, same: bool
) -> None:
    assert (mask_difference(visible, window, 1024) is None) == same


def test_no_chunk_is_noticed_that_no_sequence_reaches() -> None:
    chunked = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int))
    assert mask_difference(chunked, None, 8192) is None
    assert mask_difference(chunked, None, 8193) is not None


def test_a_dropped_soft_cap_is_noticed_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint(tmp_path, "gemma2")
    load(folder, "bfloat16")
    own = modeling_gemma2.eager_attention_forward

    def uncapped(*args: Any, softcap: float | None = None, **others: Any) -> Any:
        return own(*args, **others)

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", uncapped)
    monkeypatch.setattr("engine.family.share.check_long_sequences", lambda *_: None)
    assert "the gemma2 family can't be served (self check)" in refused(folder, dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.12)])
def test_the_bound_is_what_other_sums_do(tmp_path: Path, dtype: str, most: float) -> None:
    folder = random_checkpoint(tmp_path, "qwen3")
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype=dtype)
    assert 0.9e-4 <= eager_reference(model).bound <= most


def test_noise_is_seen_row_by_row() -> None:
    """A row without rounding has the least bound, one with much of it three times that."""
    layer = torch.nn.Linear(512, 16, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 512, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0
    expected = layer(x).float()
    quiet, noisy = noise_bound(lambda: layer(x), expected).tolist()
    assert quiet == pytest.approx(4 * torch.finfo(torch.bfloat16).eps)
    assert noisy >= quiet


def branching(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.embedding(ids, torch.ones(32, 4))[0]
    return hidden[rows] * (2.0 if ids.shape[1] > 24 else 1.0)


def test_a_graph_for_few_tokens_only_is_no_graph() -> None:
    with pytest.raises(NotCaptured, match="branches on the number of tokens"):
        capture(branching, torch.device("cpu"))


def test_a_graph_that_is_wrong_for_long_runs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a branch captured unseen, the run of 300 tokens tells."""
    path = tmp_path / "graph.json"
    monkeypatch.setattr(build, "recorded", lambda model: recordings._record(model, path))
    monkeypatch.setattr(capturing, "_check_inputs", lambda made: None)
    own = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        return own(self, x) * (1.1 if x.shape[1] > 200 else 1.0)

    folder = random_checkpoint(tmp_path / "model")
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    monkeypatch.setattr("engine.family.share.check_long_sequences", lambda *_: None)
    assert load(folder, compiled=True).model.flat is None
