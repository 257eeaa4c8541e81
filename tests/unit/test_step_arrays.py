"""A step's indices, made without work per token, beside the planner's; and their one buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.inputs import StepPacking, TableCache, step_arrays
from engine.attention.torch_plan import Planner
from engine.core.step import SampleRequest, SequenceSlice
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane
from kvrelay.types import RequestKey, Sampling

_PLANES = (Plane(name="k", heads=1, dim=2), Plane(name="v", heads=1, dim=2))
_LAYOUT = KvLayout(
    groups=(
        LayerGroup(layers=(0,), planes=_PLANES),
        LayerGroup(layers=(1,), planes=_PLANES, window=5),
    ),
    dtype="float32",
    block_size=4,
)
_REQUEST = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
)


def _slice(name: str, start: int, tokens: int, *, samples: bool = True) -> SequenceSlice:
    letters = np.random.default_rng(start + 100 * tokens)
    blocks = letters.permutation(50)[: -(-(start + tokens) // 4)].tolist()
    full = tuple(map(BlockId, blocks))
    gone = max(0, start - 4) // 4
    return SequenceSlice(
        key=RequestKey(name, 0),
        choice=0,
        token_ids=tuple(letters.integers(0, 99, tokens).tolist()),
        start=start,
        tables=(full, (NO_BLOCK,) * gone + full[gone:]),
        samples=(_REQUEST,) if samples else (),
    )


_BATCH = [
    _slice("a", 0, 7),
    _slice("b", 21, 1),
    _slice("c", 9, 5, samples=False),
    _slice("d", 0, 1),
    _slice("e", 8, 1),
]


def test_as_the_planner_says() -> None:
    """It sorts decode rows by length: given in that order, all is equal."""
    batch = [_BATCH[3], _BATCH[4], _BATCH[1], _BATCH[0], _BATCH[2]]
    plan = Planner(_LAYOUT, torch.device("cpu"), torch.float32).plan(batch)
    ours = step_arrays(_LAYOUT, batch, TableCache())
    assert ours.token_ids.tolist() == plan.token_ids[0].tolist()
    assert ours.positions.tolist() == plan.positions[0].tolist()
    assert ours.logit_rows.tolist() == plan.logit_rows.tolist()
    for mine, theirs in zip(ours.groups, plan.groups, strict=True):
        assert mine.slots.tolist() == theirs.slots.tolist()


def test_the_tokens_of_one_short_chunk_have_their_own_rows() -> None:
    found = step_arrays(_LAYOUT, [_slice("a", 5, 1), _slice("b", 8, 2)], TableCache())
    assert found.rows.tolist() == [0, 1] and found.positions.tolist() == [5, 8, 9]


def test_slices_of_one_token_come_first_in_the_batchs_order() -> None:
    found = step_arrays(_LAYOUT, _BATCH, TableCache())
    assert found.order == [1, 3, 4, 0, 2]
    assert found.decodes == 3
    assert found.counts.tolist() == [1, 1, 1, 7, 5]
    assert found.rows.tolist() == [0, 1, 2, 3, 10]
    assert found.starts.tolist() == [21, 0, 8, 0, 9]
    assert found.logit_rows.tolist() == [9, 0, 1, 2]
    windowed = found.groups[1]
    for i, piece in zip(range(5), (_BATCH[j] for j in found.order), strict=True):
        begin = windowed.table_starts[i]
        end = begin + len(piece.tables[1])
        assert windowed.tables[begin:end].tolist() == list(piece.tables[1])


def test_tables_are_remembered_until_they_change() -> None:
    cache = TableCache()
    first = cache.arrays(_BATCH)
    again = cache.arrays([*_BATCH[:2], _slice("c", 20, 5), *_BATCH[3:]])
    kept = [mine[0] is theirs[0] for mine, theirs in zip(first, again, strict=True)]
    assert kept == [True, True, False, True, True]
    assert again[2][0].tolist() == list(_slice("c", 20, 5).tables[0])
    cache.arrays(_BATCH[:1])
    assert cache.arrays(_BATCH)[1][0] is not first[1][0]


def test_two_slices_of_one_name_keep_their_own_tables() -> None:
    one, other = _slice("a", 0, 7), _slice("a", 12, 1)
    found = TableCache().arrays([one, other])
    assert [tables[0].tolist() for tables in found] == [list(one.tables[0]), list(other.tables[0])]


def test_arrays_share_one_buffer_of_which_the_last_may_be_short() -> None:
    packing = StepPacking({"a": (3,), "b": (2, 2), "c": (9,)})
    named = {"a": np.array([1, 2]), "b": np.arange(4).reshape(2, 2), "c": np.array([7])}
    sent = packing.pack(named, pinned=False)
    assert sent.numel() == 4 + 4 + 1
    buffer = torch.zeros(packing.elements, dtype=torch.int32)
    buffer[: sent.numel()] = sent
    views = packing.views(buffer)
    assert views["a"][:2].tolist() == [1, 2]
    assert views["b"].tolist() == [[0, 1], [2, 3]]
    assert views["c"][0] == 7 and views["c"].shape == (9,)
    assert all(view.data_ptr() % 16 == buffer.data_ptr() % 16 for view in views.values())


def test_elements_that_an_array_leaves_get_their_filling() -> None:
    packing = StepPacking({"a": (6,), "b": (2,)})
    named = {"a": np.array([1, 2]), "b": np.array([7, 8])}
    sent = packing.pack(named, pinned=False, filling={"a": -1})
    assert packing.views(sent)["a"].tolist() == [1, 2, -1, -1, -1, -1]
    assert packing.views(sent)["b"].tolist() == [7, 8]


def test_an_array_longer_than_its_place_is_refused() -> None:
    with pytest.raises(AssertionError, match="a"):
        StepPacking({"a": (3,)}).pack({"a": np.arange(4)}, pinned=False)
