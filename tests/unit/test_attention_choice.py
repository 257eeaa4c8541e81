"""Which attention backend is taken, and what is said when the one asked for can't be."""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise

import pytest
import torch

from engine.attention.backend import GroupShape
from engine.attention.choosing import choice, needs
from engine.attention.choosing.needs import Wanted
from engine.attention.cuda.graphs import bucket_sizes
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.errors import ModelError

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_SHAPE = GroupShape(query_heads=4, kv_heads=2, dim=64, value_dim=64, window=None)
_PLANES = (Plane(name="k", heads=2, dim=64), Plane(name="v", heads=2, dim=64))
_LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0,), planes=_PLANES),), dtype="bfloat16", block_size=16
)


def _wanted(device: torch.device, shape: GroupShape = _SHAPE, layout: KvLayout = _LAYOUT) -> Wanted:
    return Wanted(device=device, dtype=torch.bfloat16, layout=layout, groups=(shape,))


def _refusal(
    name: str, device: torch.device, shape: GroupShape = _SHAPE, layout: KvLayout = _LAYOUT
) -> str:
    with pytest.raises(ModelError) as found:
        choice.choose(name, _wanted(device, shape, layout))
    text = str(found.value)
    assert text.startswith(f"attention.backend: {name} can't be used: ")
    return text


@pytest.mark.parametrize("name", ["triton", "flashinfer", "flash"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    assert "this worker runs on cpu: use sdpa, or use auto" in _refusal(name, _CPU)


@pytest.mark.parametrize(
    ("name", "how"), [("flashinfer", "flashinfer-python"), ("flash", "FlashAttention-3")]
)
def test_what_isnt_installed_says_how_to_install_it(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda module: None)
    assert how in _refusal(name, _CUDA)


@pytest.mark.parametrize("name", ["flashinfer", "flash"])
@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        (_SHAPE, "float32", "not float32"),
        (replace(_SHAPE, has_sinks=True), "bfloat16", "no sinks"),
        (replace(_SHAPE, dim=512, value_dim=512), "bfloat16", "dims"),
    ],
)
def test_what_doesnt_fit_the_model_says_why(
    name: str, shape: GroupShape, dtype: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda module: ModuleSpec(module, None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why in _refusal(name, _CUDA, shape, replace(_LAYOUT, dtype=dtype))


def test_flash_attention_3_asks_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda module: ModuleSpec(module, None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Hopper" in _refusal("flash", _CUDA)


@pytest.mark.parametrize(("reason", "taken"), [(None, "native"), ("no compiler", "sdpa")])
def test_auto_on_a_cpu_takes_our_kernel_if_it_can(
    reason: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(needs.NEEDS, "native", lambda wanted: reason)
    assert choice.choose("auto", _wanted(_CPU)) == (taken,)


def test_the_cpus_kernel_is_refused_on_cuda_and_where_it_isnt_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "runs on cuda: use triton" in _refusal("native", _CUDA)
    monkeypatch.setattr(needs, "kernel_for", lambda layout, device: None)
    assert "use sdpa" in _refusal("native", _CPU)


@pytest.mark.parametrize("name", ["sdpa", "flashinfer", "flash"])
def test_fp8_kv_is_served_by_triton_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda module: ModuleSpec(module, None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kept = replace(_LAYOUT, dtype="float8_e4m3fn")
    assert "use triton" in _refusal(name, _CUDA, layout=kept) or name == "sdpa"
    assert choice.choose("auto", _wanted(_CUDA, layout=kept)) == ("triton",)
    with pytest.raises(ModelError, match=r"only triton, on CUDA, serves engine\.kv_dtype: fp8"):
        choice.choose("auto", _wanted(_CPU, layout=kept))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "capability 8.9" in _refusal("triton", _CUDA, layout=kept)


@pytest.mark.parametrize(
    ("installed", "compared"),
    [
        (("triton", "flash", "flashinfer"), ("triton", "flashinfer", "flash")),
        (("triton",), ("triton",)),
        (("flash",), ("flash",)),
        ((), ("sdpa",)),
    ],
)
def test_auto_on_cuda_compares_what_is_installed(
    installed: tuple[str, ...], compared: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded comes first."""
    for name in ("triton", "flash", "flashinfer"):
        reason = None if name in installed else "not installed"
        monkeypatch.setitem(needs.NEEDS, name, lambda wanted, reason=reason: reason)
    assert choice.choose("auto", _wanted(_CUDA)) == compared


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (6, (1, 2, 4, 6)), (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)), (33, None)],
)
def test_recorded_batch_sizes(most: int, sizes: tuple[int, ...] | None) -> None:
    found = bucket_sizes(most)
    assert found[-1] == most
    assert sizes is None or found == sizes
    assert all(b <= 2 * a for a, b in pairwise(found))
