"""What a configuration says of parameters and KV agrees with what is published of the models."""

from __future__ import annotations

import pytest
import yaml

from cluster.sim.profiles.load import known_shape, model_names
from engine.core.model_shape import ModelShape, read_shape
from kvrelay.errors import ModelError

# Of the models' cards, in billions.
PUBLISHED = {
    "llama-2-7b": (6.74, None),
    "llama-2-70b": (68.98, None),
    "llama-3.1-8b": (8.03, None),
    "qwen3-235b-a22b": (235, 22),
    "qwen3.5-397b-a17b": (397, 17),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "gpt-oss-120b": (116.8, 5.1),
    "bloom-176b": (176.2, None),
}


def shape(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, published: tuple[float, float | None]) -> None:
    stored, active = published
    assert shape(name).parameters / 1e9 == pytest.approx(stored, rel=0.005)
    if active is not None:
        used = shape(name).active_parameters + shape(name).head_parameters
        assert used / 1e9 == pytest.approx(active, rel=0.06)


def test_kv_of_a_token_is_as_published() -> None:
    """Llama: PagedAttention's arithmetic; DeepSeek-V2: arXiv:2405.04434 keeps 576 of 32,768."""
    assert shape("llama-2-7b").kv_bytes_per_token() == 524_288
    assert shape("llama-2-70b").kv_bytes_per_token() == 327_680
    heads = 2 * 128 * 128 * 60
    assert heads / shape("deepseek-v2").kv_elements_per_token == pytest.approx(56.9, abs=0.02)


def test_kv_of_a_long_prompt_is_counted_for_all_heads() -> None:
    """80 layers of 32 KV heads of 128 in 16 bits: 328 GB at 250,000 tokens."""
    config = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 32,
        "intermediate_size": 28672,
        "vocab_size": 32000,
    }
    long = read_shape(config, "long")
    assert 250_000 * long.kv_bytes_per_token() / 1e9 == pytest.approx(328, abs=0.5)


def test_sparse_attention_keeps_all_and_reads_what_it_has_chosen() -> None:
    main, indexer = shape("glm-5").attentions
    assert main.kept_tokens(100_000) == 100_000 and main.seen_tokens(100_000) == 2048
    assert indexer.seen_tokens(100_000) == 100_000


def test_linear_layers_keep_a_state_that_does_not_grow() -> None:
    qwen = shape("qwen3.5-397b-a17b")
    assert qwen.state_bytes_per_sequence == 45 * 64 * 128 * 128 * 4
    assert qwen.kv_elements_per_token == 15 * 2 * 2 * 256


def test_a_batch_touches_experts_as_it_grows() -> None:
    deepseek = shape("deepseek-v3")
    one, all_ = deepseek.touched_expert_parameters(1), deepseek.touched_expert_parameters(1e4)
    assert one == pytest.approx(deepseek.expert_parameters * 8 / 256)
    assert all_ == pytest.approx(deepseek.expert_parameters)


def test_a_vision_models_text_part_is_read() -> None:
    inner = yaml.safe_load(
        "{num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 100,"
        " intermediate_size: 128}"
    )
    assert read_shape({"text_config": inner, "vocab_size": 7}, "m").head_parameters == 6400


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_missing_size_is_named(key: str) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    del config[key]
    with pytest.raises(ModelError, match=key):
        read_shape(config, "m")


def test_every_bundled_shape_can_be_read() -> None:
    assert all(shape(name).parameters > 1e9 for name in model_names())
