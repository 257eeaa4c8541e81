"""Which workers may serve together: decided when one joins, not at a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.core.layout.block_names import NamedFormat, named_format
from kvrelay.errors import PeerError
from kvrelay.messages import WorkerHello
from kvrelay.types import Role
from router.core.state.worker_view import check_joins
from tests.unit.router_kit import hello
from tests.unit.worker_kit import LAYOUT


def of(name: str, role: Role, dtype: str, *, mixed: bool = False) -> WorkerHello:
    layout = replace(LAYOUT, dtype=dtype)
    named = named_format(layout, codec="none", mixed_precision=mixed)
    return replace(hello(name, role), physical_format=named)


PREFILL = of("p", Role.PREFILL, "float32")


def test_the_format_is_read_as_it_was_written() -> None:
    named = named_format(LAYOUT, codec="int8", mixed_precision=True)
    assert NamedFormat.of(named) == NamedFormat(dtype=LAYOUT.dtype, mixed_precision=True)
    plain = named_format(LAYOUT, codec="none", mixed_precision=False)
    assert not NamedFormat.of(plain).mixed_precision


def test_another_dtype_on_the_other_side_is_refused() -> None:
    with pytest.raises(PeerError, match="worker d has KV in bfloat16, p in float32: give both"):
        check_joins(of("d", Role.DECODE, "bfloat16"), [PREFILL])


@pytest.mark.parametrize("side", ["one", "both"])
def test_both_must_allow_mixed_precision(side: str) -> None:
    here = of("d", Role.DECODE, "bfloat16", mixed=True)
    there = of("p", Role.PREFILL, "float32", mixed=side == "both")
    if side == "both":
        check_joins(here, [there])
        return
    with pytest.raises(PeerError, match="allow_mixed_precision: true on both"):
        check_joins(here, [there])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
def test_only_those_that_hand_over_need_the_same(role: Role) -> None:
    check_joins(of("other", role, "bfloat16"), [PREFILL])


def test_block_sizes_may_differ() -> None:
    check_joins(replace(hello("d", Role.DECODE), physical_format="float32/block24"), [PREFILL])


def test_another_model_is_refused() -> None:
    other = replace(of("d", Role.DECODE, "float32"), fingerprint="beef")
    with pytest.raises(PeerError, match=r"d serves another model than p \(fingerprint beef, not"):
        check_joins(other, [PREFILL])
