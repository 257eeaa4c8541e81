"""What `kvrelay plan MODEL` says fits, and the bounds that it prints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import engine.bundled
from cluster.cli.main import app
from cluster.sim.planning.model_facts import find_facts
from cluster.sim.profiles.capacity import (
    CopyCapacity,
    PlannedModel,
    Refusals,
    Unfit,
    capacity,
    smallest_copy,
)
from cluster.sim.profiles.load import _bundled, known_device
from cluster.sim.profiles.roofline import Parallel
from cluster.sim.profiles.schema import Dtype
from cluster.sim.profiles.worker_memory import GRAPH_BYTES, WORKSPACE_BYTES, planned_limits
from engine.core.sizing import MOST_CONTEXT_BYTES, MemoryProfile, size_ranks, staging_bytes
from engine.family.build import bare_model
from engine.family.startable import whole_shapes
from engine.model.kv_layout import derive_layout
from engine.model.model import Model
from engine.parallel.grid import Grid
from engine.parallel.ranks import pool_map
from kvpool.core.layout.layout import KvLayout
from kvrelay.errors import ModelError
from tests.models import random_checkpoint
from tests.unit.test_startable import family
from tests.unit.test_weights import cuts_of

LIMITS = planned_limits(0.9)
_BUNDLED = Path(engine.bundled.__file__).parent / "checkpoint"


def fitted(facts: PlannedModel, device: str, context: int = 4096) -> CopyCapacity:
    found = smallest_copy(facts, device, known_device(device), context, LIMITS)
    assert isinstance(found, CopyCapacity), found
    return found


def unfit(facts: PlannedModel, device: str, **degrees: int) -> str:
    one = known_device(device)
    found = (
        capacity(facts, device, one, Parallel(**degrees), 4096, LIMITS)
        if degrees
        else smallest_copy(facts, device, one, 4096, LIMITS)
    )
    assert isinstance(found, Unfit), found
    return found.why


def test_seventy_billion_take_two_h200_and_what_is_left_holds_kv() -> None:
    found = fitted(find_facts("llama-2-70b"), "h200-sxm")
    assert found.devices == 2
    slabs = 6 * 322 * 2**21  # of 2,048 tokens, with their headers, in steps of 2 MiB
    free = 0.9 * 141e9 - found.weight_bytes_per_device - slabs - 3 * 2**29 - 2**29 - 2**27
    assert 0.98 < found.kv_tokens / (free / (327_680 / 2)) < 1, "the rest are activations"
    assert found.kv_tokens // 4096 == 75 and found.batch == LIMITS.max_running_requests


def test_a_degree_whose_first_rank_has_no_room_for_slabs_is_refused() -> None:
    """8.4 GB are left of each of two L4, and six slabs of a prefill chunk's KV take 10.1 GB."""
    large = find_facts("llama-2-13b")
    assert fitted(large, "l4").devices == 4
    why = unfit(large, "l4", tensor=2)
    assert "2 of them: rank 0 of 2, with 0.5 of the KV: only 0 tokens of KV fit" in why
    assert "staging 9.387 GiB" in why
    assert "rank 0 of 2" in unfit(large, "l4", pipeline=2)


SHAPES = ("llama-2-13b", "llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v2", "gpt-oss-120b")
GRIDS = (Grid(), Grid(tensor=2), Grid(tensor=8), Grid(stages=4), Grid(tensor=2, stages=2))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_has_the_kv_for_which_serve_finds_room(
    name: str, grid: Grid, layouts: Callable[[str], KvLayout]
) -> None:
    """serve has the layout that it probes, the parts of ranks from its map of the pool, and, in
    place of what it measures, what a plan allows for."""
    layout, facts = layouts(name), find_facts(name)
    device = known_device("b200-sxm").model_copy(update={"memory_bytes": 600_000_000_000})
    worker = facts.worker(device, Parallel(tensor=grid.tensor, pipeline=grid.stages), LIMITS)
    measured = MemoryProfile(
        total_bytes=device.memory_bytes,
        weight_bytes=0,
        activation_bytes=worker.activation_bytes(),
        context_bytes=MOST_CONTEXT_BYTES,
        kept_bytes=WORKSPACE_BYTES,
        graph_bytes=GRAPH_BYTES,
    )
    weights = [round(worker.weight_bytes[grid.stage(rank)]) for rank in range(grid.size)]
    profiles = [replace(measured, weight_bytes=own) for own in weights]
    slabs = staging_bytes(layout, LIMITS, on_cpu=False)
    profiles[0] = replace(profiles[0], staging_bytes=slabs)
    parts = [one.layout.bytes_per_block for one in pool_map(layout, 1, grid, apart=True).parts]
    served = size_ranks(layout, LIMITS, profiles, max_model_len=10**7, block_bytes=parts)
    assert 0.9 * served.tokens <= worker.sizing().tokens <= served.tokens


@pytest.fixture
def layouts(tmp_path: Path) -> Callable[[str], KvLayout]:
    """# known shape |-> the KV that a worker keeps of it"""

    def probed(name: str) -> KvLayout:
        config = {"architectures": ["ItForCausalLM"], **_bundled("models.yaml")[name]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return layout_of(tmp_path)

    return probed


def layout_of(folder: Path) -> KvLayout:
    bare = bare_model(folder, device="cpu", dtype="bfloat16")
    return derive_layout(whole_shapes(bare), dtype="bfloat16", block_size=16)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v2", "deepseek_v3", "minicpm3"])
def test_kv_is_that_of_the_heads_that_a_worker_keeps(name: str, tmp_path: Path) -> None:
    folder = family(tmp_path, name)
    assert (
        layout_of(folder).bytes_per_token
        == find_facts(str(folder), weights="float16").kv_bytes_per_token
    )


def test_eight_bits_halve_weights_and_need_one_device() -> None:
    facts = find_facts("llama-2-70b", weights="float8")
    embeddings = 2 * 32000 * 8192 * 2
    assert facts.weight_bytes == pytest.approx(68.98e9 - embeddings / 2 + embeddings, rel=1e-3)
    assert fitted(facts, "h200-sxm").devices == 1


def test_weights_in_eight_bits_are_loaded_in_sixteen() -> None:
    facts = find_facts("llama-2-70b", weights="float8")
    assert fitted(facts, "l40s").devices == 4, "two would hold them, once they are converted"
    assert "64.48 GiB of them in 16 bits don't fit" in unfit(facts, "l40s", tensor=2)
    assert "compute capability 8.9" in unfit(facts, "a100-80gb-sxm")


def test_experts_stay_in_sixteen_bits() -> None:
    sixteen, eight = (find_facts("qwen3-235b-a22b", weights=w) for w in (None, "float8"))
    assert eight.weight_bytes == sixteen.weight_bytes - sixteen.shape.dense_parameters


@pytest.mark.parametrize(
    ("weights", "kv", "why"),
    [
        ("int4", None, "loads weights of 16 or 32 bits"),
        (None, "int8", "keeps KV in the dtype"),
        (None, "float32", "keeps KV in the dtype of the weights, here float16"),
        ("float32", "float16", "keeps KV in the dtype of the weights, here float32"),
    ],
)
def test_formats_that_no_worker_has_are_refused(
    weights: Dtype | None, kv: Dtype | None, why: str
) -> None:
    assert why in find_facts("llama-2-7b", weights=weights, kv=kv).refusals.refused


def test_everything_is_as_wide_as_weights_of_32_bits() -> None:
    """KV, embeddings and head, and activations."""
    usual, wide = (find_facts("llama-2-7b", weights=w) for w in (None, "float32"))
    assert wide.kv_bytes_per_token == 2 * 524_288
    assert wide.weight_bytes == 2 * usual.weight_bytes
    for parallel in (Parallel(), Parallel(tensor=2)):
        ones, others = (
            facts.worker(known_device("h200-sxm"), parallel, LIMITS) for facts in (usual, wide)
        )
        assert others.weight_bytes == tuple(2 * each for each in ones.weight_bytes)
        assert 1.7 < others.activation_bytes() / ones.activation_bytes() < 2


def test_windows_of_some_layers_save_no_blocks() -> None:
    """Each kind of layers has as many."""
    found = fitted(find_facts("gpt-oss-120b", weights="float4"), "h200-sxm", 16384)
    assert found.batch == found.kv_tokens // 16384
    seen = find_facts("llama-2-7b")
    sliding = replace(seen.shape.attentions[0], window=4096)
    windowed = replace(seen, shape=replace(seen.shape, attentions=(sliding,)))
    found = fitted(windowed, "h200-sxm", 16384)
    assert found.batch == found.kv_tokens // 4096


def test_the_smallest_copy_has_a_degree_that_a_worker_can_start() -> None:
    facts = find_facts("llama-2-70b")
    odd = replace(facts, refusals=Refusals(unsplit={2: "why", 4: "why"}))
    assert [fitted(one, "h200-sxm").devices for one in (facts, odd)] == [2, 8]
    whole = replace(facts, refusals=Refusals(unsplit=dict.fromkeys((2, 4, 8), "why")))
    assert "1 of them: only 0 tokens of KV fit" in unfit(whole, "h200-sxm")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_plan_has_the_weights_that_each_rank_loads(tmp_path: Path, is_tied: bool) -> None:
    """The KV heads are on two ranks each."""
    folder = random_checkpoint(tmp_path, tie_word_embeddings=is_tied, vocab_size=4096)
    facts = find_facts(str(folder))
    bare = bare_model(folder, device="cpu", dtype="float32")
    for degree in (1, 2, 4):
        loaded = 4 * share_parameters(bare, degree)
        (held,) = facts.rank_bytes(Parallel(tensor=degree))
        assert held == pytest.approx(loaded, rel=0.02)


def share_parameters(bare: Model, degree: int) -> int:
    cuts = cuts_of(bare, 0, degree)
    whole = bare.module.named_parameters()
    return sum(
        prod(cuts[name].shape(one.shape) if name in cuts else one.shape)
        for name, one in whole
        if degree > 1 or name not in bare.module.all_tied_weights_keys
    )


def test_stages_keep_embeddings_or_the_head() -> None:
    """Of 80 layers, a stage of three has one more than 26."""
    facts = find_facts("llama-2-70b")
    whole, layers = 2 * 32000 * 8192, facts.weight_bytes - 2 * 2 * 32000 * 8192
    assert facts.rank_bytes(Parallel(pipeline=2)) == (layers / 2 + whole,) * 2
    parts = facts.rank_bytes(Parallel(tensor=2, pipeline=3))
    assert parts == pytest.approx(
        [layers * 27 / 160 + whole, layers * 27 / 160, layers * 26 / 160 + whole / 2]
    )


def test_a_sequence_that_is_longer_than_the_kv_does_not_fit() -> None:
    long = capacity(
        find_facts("llama-2-13b"), "l4", known_device("l4"), Parallel(tensor=4), 32768, LIMITS
    )
    assert isinstance(long, Unfit)
    assert long.why.endswith("tokens of KV fit, a sequence has 32768")


def test_weights_that_fit_nowhere_are_told() -> None:
    assert "1 of them: only 0 tokens of KV fit" in unfit(find_facts("deepseek-v3"), "l4")


def test_bounds_follow_the_data_sheet() -> None:
    """Llama-3.1-8B alone on an H200: its weights but the embedding, 15 GB, at 4.8 TB/s."""
    found = fitted(find_facts("llama-3.1-8b"), "h200-sxm", context=1)
    assert 1 / found.least_tpot_s == pytest.approx(319, rel=0.01)
    assert found.decode_tokens_per_s == pytest.approx(found.batch / found.batch_tpot_s)


def test_a_folder_s_own_weights_are_counted() -> None:
    facts = find_facts(str(_BUNDLED))
    held = (_BUNDLED / "model.safetensors").stat().st_size
    assert facts.weight_bytes == pytest.approx(held, rel=0.01)


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    shutil.copy(_BUNDLED / "config.json", tmp_path)
    alone, whole = find_facts(str(tmp_path)), find_facts(str(_BUNDLED))
    assert alone.kv_bytes_per_token == whole.kv_bytes_per_token
    assert alone.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.05)


def test_quantised_checkpoints_are_recognised(tmp_path: Path) -> None:
    config = json.loads((_BUNDLED / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_facts(str(tmp_path)).precision.weights == "float8"


def test_an_unknown_model_is_told_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="shapes known by name are llama-2-7b"):
        find_facts(str(tmp_path / "nothing"))


def test_the_command_prints_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "llama-2-7b", "--gpus", "l4,h100-sxm", "--format", "json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["kv_bytes_per_token"] == 524_288
    assert [device["device"] for device in told["devices"]] == ["l4", "h100-sxm"]
    app(["plan", "deepseek-v3", "--gpus", "l4"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "l4, 1 of them: only 0 tokens of KV fit: 0.9 x 22.35 GiB - weights" in shown
    assert "tensor   1: the deepseek_v3 family can't be split over ranks" in shown


def test_a_refusal_is_said_before_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "bloom-176b", "--gpus", "h200-sxm"], standalone_mode=False)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("serve refuses this model: the bloom family can't be served")
    app(["plan", "bloom-176b", "--gpus", "h200-sxm", "--format", "json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["refused"] in first and told["devices"][0]["devices"] == 8
