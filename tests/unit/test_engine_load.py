"""What loading refuses, measures and tells."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from engine.attention import torch_paged
from engine.core.sizing import EngineLimits, in_steps, staging_bytes
from engine.family.allowed import check_family
from engine.family.build import load_model
from engine.load import load_engine
from engine.model.checkpoint import SINGLE, open_checkpoint
from engine.model.families import longrope_border_tokens
from engine.runner import Engine
from engine.sampling.native_draw import host_draw
from kvpool.memory.collate import slab_bytes
from kvrelay.errors import ModelError
from tests.models import family_config, random_checkpoint

LIMITS = EngineLimits(max_model_len=None, prefill_chunk_tokens=64, max_running_requests=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"))


def load(folder: Path, limits: EngineLimits = LIMITS, **options: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "auto", "block_size": 16, "blocks": None, **options}
    return load_engine(open_checkpoint(str(folder)), limits=limits, **settings)


@pytest.mark.parametrize("kind", ["falcon", "bloom", "mpt", "qwen3_next", "llama4_text"])
def test_refused_families(kind: str) -> None:
    with pytest.raises(ModelError, match=f"the {kind} family can't be served"):
        check_family(AutoConfig.for_model(kind))


def test_layers_beyond_full_and_sliding_are_refused() -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="it has linear_attention layers"):
        check_family(config)


def test_dynamic_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelError, match="dynamic RoPE"):
        check_family(AutoConfig.for_model("llama", rope_parameters=rope))


def test_an_encoder_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no causal language model|can't be served"):
        check_family(AutoConfig.for_model("t5"))


def test_a_family_without_the_attention_interface_is_refused() -> None:
    """Not one of those refused by name."""
    with pytest.raises(ModelError, match=r"the codegen .* \(interface check\): its atten"):
        check_family(AutoConfig.for_model("codegen"))


def test_longrope_is_recognised() -> None:
    assert longrope_border_tokens(family_config("phi3_longrope")) == 256
    assert longrope_border_tokens(AutoConfig.for_model("llama")) is None


def test_facts_and_sizing(llama: Path) -> None:
    engine = load(llama)
    assert engine.facts.architecture == "LlamaForCausalLM"
    assert engine.facts.max_model_len == 1024
    assert engine.facts.dtype == engine.layout.dtype == "float32"
    assert engine.sizing.blocks == engine.memory.blocks == 4 * 1024 // 16
    assert "all that 4 requests can need" in engine.sizing.reason


def test_the_fingerprint_tells_checkpoints_apart(llama: Path, tmp_path: Path) -> None:
    own = load(llama).facts.fingerprint
    assert load(llama, dtype="bfloat16", block_size=32).facts.fingerprint == own
    assert load(random_checkpoint(tmp_path, seed=1)).facts.fingerprint != own


def test_a_context_beyond_the_models_is_refused(llama: Path) -> None:
    with pytest.raises(ModelError, match=r"max_model_len is 2048, but .* ends at 1024"):
        load(llama, replace(LIMITS, max_model_len=2048))


def test_too_little_memory_is_refused(llama: Path) -> None:
    with pytest.raises(ModelError, match="tokens of KV fit"):
        load(llama, replace(LIMITS, kv_memory_bytes=1000))


def test_staging_is_all_slabs_or_a_gpus_two_copies(llama: Path) -> None:
    layout = load(llama).layout
    limits = replace(LIMITS, staging_slabs=4, prefill_chunk_tokens=100)
    slab = slab_bytes(layout, 100)
    assert staging_bytes(layout, limits, on_cpu=True) == 4 * slab
    assert staging_bytes(layout, limits, on_cpu=False) == 2 * in_steps(slab)


def test_a_pool_that_memory_can_not_hold_is_refused(tmp_path: Path) -> None:
    endless = random_checkpoint(tmp_path, max_position_embeddings=2**44)
    with pytest.raises(ModelError, match=r"the memory of cpu is too small .*lower kv_memory, mem"):
        load(endless, replace(LIMITS, kv_memory_bytes=2**50))
    with pytest.raises(ModelError, match=r"the memory of cpu is too small .*memory_fraction or"):
        load(endless, replace(LIMITS, prefill_chunk_tokens=2**44))


def test_an_absent_gpu_is_refused_before_weights_are_read(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    checkpoint = open_checkpoint(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no CUDA device here: "):
        load_model(checkpoint, device="cuda:99", dtype="auto")


@pytest.mark.parametrize("error", [ImportError, KeyError, AttributeError, TypeError])
def test_whatever_transformers_raises_becomes_one_line(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("it needs\na package")

    monkeypatch.setattr("engine.family.build.read_weights", fail)
    with pytest.raises(ModelError, match=r"can't be loaded on cpu: .*needs.*a package") as caught:
        load(llama)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_there_are_named(llama: Path, tmp_path: Path) -> None:
    """transformers would take random ones, and the self-check compares the model with itself."""
    folder = Path(shutil.copytree(llama, tmp_path / "part"))
    tensors = load_file(folder / SINGLE)
    absent = [name for name in sorted(tensors) if ".mlp." in name]
    kept = {name: tensor for name, tensor in tensors.items() if name not in absent}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    said = f"lacks weights of its LlamaForCausalLM: {absent[0]}, {absent[1]} and {len(absent) - 2}"
    assert f"{said} more: download it again" in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_types_pass_the_self_check(llama: Path, dtype: str) -> None:
    assert load(llama, dtype=dtype).layout.dtype == dtype


def test_the_self_check_notices_wrong_attention(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached blocks taken one slot off: the model's own forward disagrees."""
    pick = torch_paged._Layer._pick
    monkeypatch.setattr(
        torch_paged._Layer, "_pick", lambda self, *args: pick(self, *args).roll(1, dims=2)
    )
    with pytest.raises(ModelError, match=r"the llama family .*: paged logits differ"):
        load(llama, attention="sdpa")


def test_the_diagonal_kernel_equals_sdpa() -> None:
    """What 16-bit decoding on CPU uses, at lengths that differ by row, checked in fp32."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 8, generator=random)
    keys, values = torch.randn(2, 3, 2, 20, 8, generator=random)
    lengths = torch.tensor([20, 3, 11])
    mask = torch.zeros(3, 1, 20).masked_fill(
        torch.arange(20) >= lengths[:, None, None], float("-inf")
    )
    expected = scaled_dot_product_attention(
        query.view(3, 2, 3, 8), keys, values, attn_mask=mask[:, None], scale=0.3
    )
    found = torch_paged._decode_diagonal(query, keys, values, mask, 0.3)
    torch.testing.assert_close(found, expected.reshape(3, 6, 8))


def test_a_config_that_contradicts_itself_is_one_line(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": ["odd"]}))
    with pytest.raises(ModelError, match=r"config.json can't be used") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_what_draws_tokens_is_ready_before_the_first_request(llama: Path) -> None:
    host_draw.cache_clear()
    load(llama, blocks=4)
    assert host_draw.cache_info().currsize == 1
