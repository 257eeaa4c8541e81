"""The fused operations beside torch's, over rows that lie apart, in both types."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.compiled.library import Fused, open_fused

TYPES = [torch.float32, torch.bfloat16]
TOKENS = [1, 5, 300]
"""The last is more than one thread computes."""


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def fused(dtype: torch.dtype) -> Fused:
    return open_fused(dtype)


@pytest.fixture(params=TOKENS)
def tokens(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` was computed in float64; half a unit in the last place, and float's own error."""
    unit = torch.finfo(found.dtype).eps
    error = (found.double() - exact).abs()
    assert bool((error <= exact.abs() * (unit / 2 + 3e-6) + 1e-6).all()), float(error.max())
    assert found.is_contiguous()


def assert_rounded_alike(found: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is in float64, but was rounded wherever torch's operations would before the last; a
    sum in another order may fall to the other side now and then."""
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=1.5 * unit + 3e-6, atol=2e-6)
    near = (found.double() - exact).abs() <= exact.abs() * (unit / 2 + 3e-6) + 2e-6
    assert float(near.double().mean()) > 0.99


def norm(x: torch.Tensor, weight: torch.Tensor, rounds: bool = False) -> torch.Tensor:
    """In float64; `rounds` before the weight, to the type of `x`."""
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (scaled.to(x.dtype).double() if rounds else scaled) * weight.double()


def test_norm(fused: Fused, dtype: torch.dtype, tokens: int) -> None:
    x, weight = numbers(dtype, 1, tokens, 70)[..., 3:], numbers(torch.float32, 67)
    assert_rounded_once(fused.rms_norm(x, weight, 1e-5, False), norm(x, weight))


def test_norm_of_heads(fused: Fused, dtype: torch.dtype, tokens: int) -> None:
    x, weight = numbers(dtype, 1, tokens, 5, 24)[:, :, 1:4, 2:], numbers(torch.float32, 22)
    for heads in (x, x.transpose(1, 2)):
        assert_rounded_once(fused.rms_norm(heads, weight, 1e-5, False), norm(heads, weight))


def test_sum_and_its_norm(fused: Fused, dtype: torch.dtype, tokens: int) -> None:
    x, other = numbers(dtype, 2, 1, tokens, 67)
    weight = numbers(torch.float32, 67)
    total, normed = fused.add_rms_norm(x, other, weight, 1e-5, False)
    assert torch.equal(total, x + other)
    assert_rounded_once(normed, norm(total, weight))


def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In float64, but both products are rounded to the type of `x`."""
    near, far = x.double().chunk(2, dim=-1)
    straight, turned = x.double() * cos.double(), torch.cat((-far, near), dim=-1) * sin.double()
    return straight.to(x.dtype).double() + turned.to(x.dtype).double()


def test_rotation(fused: Fused, dtype: torch.dtype, tokens: int) -> None:
    x = numbers(dtype, 1, tokens, 7, 40)[:, :, 2:5, 4:].transpose(1, 2)
    cos, sin = numbers(dtype, 2, 1, 1, tokens, 36)
    found = fused.rotate(x, cos, sin)
    assert found.shape == x.shape
    assert_rounded_once(found.contiguous(), rotation(x, cos, sin))


def test_norms_that_round_before_the_weight(fused: Fused, dtype: torch.dtype, tokens: int) -> None:
    x, other = numbers(dtype, 2, 1, tokens, 67)
    weight = numbers(torch.float32, 67)
    total, normed = fused.add_rms_norm(x, other, weight, 1e-5, True)
    assert_rounded_alike(normed, norm(total, weight, rounds=True))
    alone = fused.rms_norm(total, weight, 1e-5, True)
    assert torch.equal(alone, normed)


def test_gates(fused: Fused, dtype: torch.dtype, tokens: int) -> None:
    both = 4 * numbers(dtype, 1, tokens, 134)
    gate, up = both[..., :67], both[..., 67:]
    wide = gate.double()
    by_silu, by_gelu = (
        act.to(dtype).double() for act in (silu(wide), gelu(wide, approximate="tanh"))
    )
    assert_rounded_alike(fused.silu_mul(gate, up), by_silu * up.double())
    assert_rounded_alike(fused.gelu_tanh_mul(gate, up), by_gelu * up.double())


def test_what_is_no_number_stays_so(fused: Fused, dtype: torch.dtype) -> None:
    """A wrong block must not turn into plausible values."""
    x = torch.full((1, 1, 32), float("nan"), dtype=dtype)
    weight = torch.ones(32)
    assert bool(fused.rms_norm(x, weight, 1e-5, True).isnan().all())
    assert bool(fused.silu_mul(x, torch.ones_like(x)).isnan().all())
    assert bool(fused.add_rms_norm(x, x, weight, 1e-5, True)[0].isnan().all())


@pytest.mark.parametrize("value", [200.0, -200.0])
def test_gates_of_large_values(fused: Fused, dtype: torch.dtype, value: float) -> None:
    x = torch.full((1, 1, 32), value, dtype=dtype)
    expected = torch.full_like(x, max(value, 0.0))
    for gate in (fused.silu_mul, fused.gelu_tanh_mul):
        torch.testing.assert_close(gate(x, torch.ones_like(x)), expected, rtol=1e-6, atol=1e-30)
