"""A model's weights are those that `from_pretrained` loads; a rank reads its part of them only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from engine.family import read_weights
from engine.family.build import bare_model, fill, load_model
from engine.family.read_weights import before
from engine.family.startable import kv_heads, whole_shapes
from engine.model import weights
from engine.model.checkpoint import INDEX, Checkpoint, open_checkpoint
from engine.model.model import Model
from engine.model.weights import Cut, Cuts, WeightReader
from engine.parallel.split import plan_cuts
from kvpool.core.layout.shards import Shard
from tests.models import FAMILIES, random_checkpoint
from tests.unit.test_parallel import KINDS, Kind


def assert_as_transformers_loads(model: Model, folder: Path, dtype: torch.dtype) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model.module, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys(), "tied parameters have one name"
        for name, tensor in theirs.items():
            assert tensor.dtype == ours[name].dtype, name
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_and_buffers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, family, tie_word_embeddings=family == "qwen3")
    checkpoint = open_checkpoint(str(folder))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = load_model(checkpoint, device="cpu", dtype=name)
        assert_as_transformers_loads(model, folder, dtype)


def cuts_of(bare: Model, rank: int, size: int) -> Cuts:
    return plan_cuts(bare.module, Shard(rank=rank, size=size), kv_heads(whole_shapes(bare)))


def a_checkpoint(kind: Kind, folder: Path) -> Checkpoint:
    random_checkpoint(folder, kind.family, **kind.changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(set(json.loads((folder / INDEX).read_text())["weight_map"].values())) > 1
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_rank_reads_its_part_of_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    checkpoint = a_checkpoint(kind, tmp_path)
    read: list[int] = []
    own = WeightReader.read

    def counted(self: WeightReader, name: str, cut: Cut | None) -> torch.Tensor:
        part = own(self, name, cut)
        read.append(part.nbytes)
        return part

    monkeypatch.setattr(WeightReader, "read", counted)
    monkeypatch.setattr(weights, "WINDOW_BYTES", 10_000)
    whole = dict(load_model(checkpoint, device="cpu", dtype="float32").module.named_parameters())
    for rank in range(kind.size):
        read.clear()
        bare = bare_model(checkpoint.path, device="cpu", dtype="float32")
        cuts = cuts_of(bare, rank, kind.size)
        module = fill(bare, checkpoint, cuts).module
        assert cuts.keys() >= {"model.layers.0.self_attn.q_proj.weight"}
        for key, found in module.named_parameters():
            tensor = whole.get(key, whole["model.embed_tokens.weight"])
            expected = cuts[key].of(tensor) if key in cuts else tensor
            assert torch.equal(found, expected), key
        tied = checkpoint_is_tied(checkpoint)
        held = sum(
            p.nbytes for key, p in module.named_parameters() if key != "lm_head.weight" or not tied
        )
        assert sum(read) == held, "nothing else was read"


def checkpoint_is_tied(checkpoint: Checkpoint) -> bool:
    return not any("lm_head.weight" in file.tensors for file in checkpoint.weights)


def test_files_are_unmapped_when_a_window_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint(tmp_path)
    files = open_checkpoint(str(folder)).weights
    monkeypatch.setattr(weights, "WINDOW_BYTES", 20_000)
    reader = WeightReader(files, torch.device("cpu"))
    for _ in range(3):
        reader.read("model.layers.0.self_attn.k_proj.weight", None)  # 8,192 bytes
        maps = Path("/proc/self/maps").read_text()
    assert str(folder / "model.safetensors") not in maps


MAPPED = ("empty", "set_")
"""How safetensors shows mapped pages as a tensor."""


class Passes(TorchDispatchMode):
    """What makes a tensor, and on which device; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, str]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if isinstance(found, torch.Tensor) and not operation.is_view and name not in MAPPED:
            self.made.append((name, found.device.type))
        return found


ROWS = Cut(dim=0, ranges=(range(2, 6),), size=4, whole=8)
UPLOAD = ("_to_copy", "meta")


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (None, [UPLOAD]),
        (ROWS, [UPLOAD]),
        (replace(ROWS, dim=1), [UPLOAD]),
        (replace(ROWS, ranges=(range(2), range(4, 6))), [UPLOAD, UPLOAD, ("cat", "meta")]),
        (replace(ROWS, size=5), [UPLOAD, ("new_zeros", "meta"), ("cat", "meta")]),
    ],
    ids=["whole", "rows", "columns", "two ranges", "padded"],
)
def test_weights_pass_the_host_once(
    cut: Cut | None, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    """From mapped pages to the device, where parts are joined. The device is stood in for: this has
    not run on one. There, columns are gathered on the host, as one copy takes whole rows."""
    files = open_checkpoint(str(random_checkpoint(tmp_path))).weights
    reader = WeightReader(files, torch.device("meta"))
    with Passes() as passes:
        found = reader.read("model.layers.0.self_attn.o_proj.weight", cut)
    assert passes.made == expected
    assert found.is_contiguous() and found.device.type == "meta"


PART = Cut(dim=1, ranges=(range(2, 4), range(8, 10)), size=4, whole=12)
"""The second third of both halves."""


def converter(*operations: Any, sources: int = 2, targets: int = 1) -> WeightConverter:
    return WeightConverter(
        source_patterns=[f"experts.*.w{i}" for i in range(sources)],
        target_patterns=[f"experts.t{i}" for i in range(targets)],
        operations=list(operations),
    )


def test_the_part_of_a_join_is_a_join_of_parts() -> None:
    experts = converter(MergeModulelist(dim=0), Concatenate(dim=1))
    assert before(PART, experts) == Cut(dim=0, ranges=(range(2, 4),), size=2, whole=6)
    assert before(PART, converter(Concatenate(dim=1))) == Cut(
        dim=1, ranges=(range(2, 4),), size=2, whole=6
    )
    one = replace(PART, ranges=(range(3, 6),), size=3)
    merged = Cut(dim=0, ranges=(range(3, 6),), size=3, whole=12)
    assert before(one, converter(MergeModulelist(dim=0), sources=1)) == merged
    assert before(one, None) == one


@pytest.mark.parametrize(
    "operations",
    [
        [Transpose(0, 1)],
        [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)],
        [MergeModulelist(dim=1), Concatenate(dim=1)],
    ],
)
def test_parts_do_not_go_through_other_operations(operations: list[Any]) -> None:
    assert before(PART, converter(*operations)) is None


def test_parts_of_other_shares_are_no_join() -> None:
    """One half more than the other."""
    odd = replace(PART, ranges=(range(4), range(8, 10)), size=6)
    assert before(odd, converter(MergeModulelist(dim=0), Concatenate(dim=1))) is None


def test_what_is_not_joined_is_read_whole_and_cut() -> None:
    """A parameter that transformers takes out of a larger one."""
    uses = {"qkv": read_weights._Use("q", converter(Chunk(dim=0), sources=1, targets=3))}
    assert read_weights._parts_before(uses, {"q": PART, "k": PART}) == {}


def test_a_part_is_padded_with_zeros() -> None:
    whole = torch.arange(10.0).view(5, 2)
    last = Cut(dim=0, ranges=(range(3, 5),), size=3, whole=5)
    assert last.of(whole).tolist() == [[6.0, 7.0], [8.0, 9.0], [0.0, 0.0]]
    assert last.is_whole(whole) and not last.is_whole(last.of(whole))
