"""Linear layers in FP8: near the model's own, in half the memory, in a graph and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.kvpool.codec_loss import Handoff, Load
from engine import load
from engine.checks import self_check
from engine.checks.summation_noise import row_differences
from engine.compiled import build
from engine.compiled.build import compile_model
from engine.compiled.fp8 import Fp8Linear, in_fp8, to_fp8
from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.model.model import Model
from engine.runner import Engine
from kvpool.core.layout.codec import Codec
from kvrelay.errors import ModelError
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.unit.test_compiled import cache, logits, plain_model, shared_cache

__all__ = ["cache", "shared_cache"]
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_LOSS = self_check._PRODUCT_LOSS


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model becomes a graph as it does on a GPU."""
    monkeypatch.setattr(Model, "on_cpu", property(lambda _: False))
    monkeypatch.setattr(build, "_device_operations", lambda _: _NoOperations())


class _NoOperations:
    """Nothing is fused."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: pytest.fail(name)


def test_a_row_s_largest_number_is_e4m3_s_largest() -> None:
    rows = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0], [1e-9, 3e-9, -2e-9]])
    values, scales = to_fp8(rows)
    assert values.dtype is torch.float8_e4m3fn
    assert values.float().abs().amax(1).tolist() == [448.0, 0.0, 448.0]
    torch.testing.assert_close(values.float() * scales, rows, rtol=0.07, atol=0)


@pytest.mark.parametrize("shape", [(1, 32), (1, 7, 32), (2, 3, 32)])
def test_a_product_is_near_the_exact_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(shape).bfloat16(), torch.randn(48).bfloat16()
    layer = Fp8Linear(torch.randn(48, 32).bfloat16() * torch.logspace(-3, 3, 48)[:, None], bias)
    weight = layer.values.double() * layer.scales.T.double()
    exact = x.double() @ weight.T + bias.double()
    found = layer(x)
    assert found.shape == (*shape[:-1], 48) and found.dtype is torch.bfloat16
    largest = x.double().abs() @ weight.T.abs() + bias.double().abs()
    assert bool(((found.double() - exact).abs() <= 0.05 * largest).all()), "small channels too"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.usefixtures("on_device")
def test_a_model_in_fp8(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its merged projections and the others, in graph and modules alike."""
    model = plain_model(tmp_path, family, "bfloat16", **_WIDE)
    expected, nbytes = logits(model, 9), model.weight_bytes
    kept = sum(t.weight.nbytes for t in _tables(model))
    monkeypatch.setattr(build, "_fuse", lambda *_: "nothing")
    monkeypatch.setattr(build, "fuse_attention", lambda *_: 0)
    compiled = compile_model(model, fp8=True)
    assert compiled.in_fp8 and compiled.flat is not None
    found = logits(compiled, 9)
    assert 0 < float(row_differences(found, expected).max()) < _LOSS
    by_modules = logits(model, 9)
    assert float(row_differences(found, by_modules).max()) < 0.02
    assert compiled.weight_bytes < kept + 0.6 * (nbytes - kept)


def _tables(model: Model) -> list[torch.nn.Module]:
    """Embeddings and the output layer, which may be one."""
    tables = (model.module.get_input_embeddings(), model.module.get_output_embeddings())
    return list({id(one.weight): one for one in tables}.values())


def test_without_a_graph_modules_change_and_the_output_layer_stays(tmp_path: Path) -> None:
    model = plain_model(tmp_path, "llama", "bfloat16", **_WIDE)
    expected, head = logits(model, 5), model.module.get_output_embeddings()
    changed = in_fp8(model)
    assert model.module.get_output_embeddings() is head
    layers = [one for one in model.module.modules() if isinstance(one, Fp8Linear)]
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert 0 < float(row_differences(logits(changed, 5), expected).max()) < _LOSS


def test_layers_of_odd_sizes_stay_as_they_are(tmp_path: Path) -> None:
    model = plain_model(tmp_path, "llama", "bfloat16", **{**_WIDE, "intermediate_size": 40})
    in_fp8(model)
    for name, layer in model.module.named_modules():
        if name.endswith("_proj"):
            assert isinstance(layer, Fp8Linear) == ("mlp" not in name), name


def test_other_dtypes_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"fp8 serves bfloat16, not torch\.float32: set model"):
        in_fp8(plain_model(tmp_path))
    with pytest.raises(ModelError, match=r"quantization: fp8 needs a CUDA device, not cpu"):
        load_engine(
            open_checkpoint(str(random_checkpoint(tmp_path / "other", "llama"))),
            device="cpu",
            dtype="bfloat16",
            block_size=16,
            blocks=8,
            limits=EngineLimits(max_model_len=64, prefill_chunk_tokens=16, max_running_requests=2),
            cuda=CudaOptions(fp8_products=True),
        )


def _served(folder: Path, *, fp8: bool) -> Engine:
    return load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype="bfloat16",
        block_size=16,
        blocks=32,
        limits=EngineLimits(max_model_len=64, prefill_chunk_tokens=48, max_running_requests=2),
        cuda=CudaOptions(fp8_products=fp8),
        compiled=False,
    )


def test_prompts_in_fp8_are_decoded_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker takes the KV as its own, and yields what bf16 yields over exactly it."""
    monkeypatch.setattr(load, "check_fp8", lambda device: None)
    folder = random_checkpoint(tmp_path, "llama", **_WIDE)
    prefill, decode = (_served(folder, fp8=fp8) for fp8 in (True, False))
    assert prefill.model.in_fp8 and not decode.model.in_fp8
    assert prefill.facts.fingerprint == decode.facts.fingerprint
    assert prefill.layout == decode.layout
    sizes = Load(prompts=2, prompt_tokens=40, output_tokens=8)
    prompts = torch.randint(2, VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(3))
    run, own = Handoff(prefill, prompts, sizes, decode), Handoff(decode, prompts, sizes)
    run.send(Codec.NONE)
    found = run.decode(received=True)
    own.first = run.first
    over_own = own.decode(received=False, forced=found.tokens)
    decode.memory.flat.copy_(prefill.memory.flat)
    expected = own.decode(received=False)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logits, expected.logits)
    assert not torch.equal(found.logits, over_own.logits), "it was the KV of FP8"
