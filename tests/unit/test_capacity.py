"""What `kvrelay plan MODEL` says fits, and the bounds that it prints."""

from __future__ import annotations

import json
import shutil
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
    capacity,
    smallest_copy,
)
from cluster.sim.profiles.load import known_device
from cluster.sim.profiles.roofline import Parallel
from engine.family.build import bare_model
from engine.model.model import Model
from kvrelay.errors import ModelError
from tests.models import random_checkpoint
from tests.unit.test_weights import cuts_of

_BUNDLED = Path(engine.bundled.__file__).parent / "checkpoint"


def fitted(facts: PlannedModel, device: str, context: int = 4096) -> CopyCapacity:
    found = smallest_copy(facts, device, known_device(device), context, 0.9)
    assert found is not None
    return found


def test_seventy_billion_take_two_h200_and_what_is_left_holds_kv() -> None:
    found = fitted(find_facts("llama-2-70b"), "h200-sxm")
    assert found.devices == 2
    free = 0.9 * 141e9 - found.weight_bytes_per_device
    assert found.kv_tokens == int(free / (327_680 / 2))
    assert found.batch == int(free / (327_680 / 2 * 4096))


def test_eight_bits_halve_weights_and_need_one_device() -> None:
    facts = find_facts("llama-2-70b", weights="float8")
    embeddings = 2 * 32000 * 8192 * 2
    assert facts.weight_bytes == pytest.approx(68.98e9 - embeddings / 2 + embeddings, rel=1e-3)
    assert fitted(facts, "h200-sxm").devices == 1


def test_a_window_lets_longer_contexts_fit() -> None:
    facts = find_facts("gpt-oss-120b", weights="float4")
    short, long = (fitted(facts, "h200-sxm", context) for context in (4096, 8192))
    assert long.batch / short.batch == pytest.approx((4096 + 128) / (8192 + 128), rel=0.01)
    assert 4096 * short.batch < short.kv_tokens * 2 == long.kv_tokens * 2


def test_the_smallest_copy_has_a_degree_that_a_worker_can_start() -> None:
    facts = find_facts("llama-2-70b")
    odd = replace(facts, refusals=Refusals(unsplit={2: "why", 4: "why"}))
    assert [fitted(one, "h200-sxm").devices for one in (facts, odd)] == [2, 8]
    whole = replace(facts, refusals=Refusals(unsplit=dict.fromkeys((2, 4, 8), "why")))
    assert smallest_copy(whole, "h200-sxm", known_device("h200-sxm"), 4096, 0.9) is None


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_plan_has_the_weights_that_each_rank_loads(tmp_path: Path, is_tied: bool) -> None:
    """The KV heads are on two ranks each."""
    folder = random_checkpoint(tmp_path, tie_word_embeddings=is_tied, vocab_size=4096)
    facts = find_facts(str(folder))
    half = replace(facts, weight_bytes=facts.weight_bytes / 2)  # it is stored in float32
    bare = bare_model(folder, device="cpu", dtype="bfloat16")
    for degree in (1, 2, 4):
        loaded = 2 * share_parameters(bare, degree)
        assert half.rank_bytes(Parallel(tensor=degree)) == pytest.approx(loaded, rel=0.02)


def share_parameters(bare: Model, degree: int) -> int:
    cuts = cuts_of(bare, 0, degree)
    whole = bare.module.named_parameters()
    return sum(
        prod(cuts[name].shape(one.shape) if name in cuts else one.shape)
        for name, one in whole
        if degree > 1 or name not in bare.module.all_tied_weights_keys
    )


def test_weights_that_fit_nowhere_are_told() -> None:
    assert smallest_copy(find_facts("deepseek-v3"), "l4", known_device("l4"), 4096, 0.9) is None
    one = capacity(
        find_facts("deepseek-v3"), "l4", known_device("l4"), Parallel(), 4096, memory_fraction=0.9
    )
    assert (one.batch, one.kv_tokens) == (0, 0)


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
    assert "too small" in shown
    assert "tensor   1: the deepseek_v3 family can't be split over ranks" in shown


def test_a_refusal_is_said_before_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "bloom-176b", "--gpus", "h200-sxm"], standalone_mode=False)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("serve refuses this model: the bloom family can't be served")
    app(["plan", "bloom-176b", "--gpus", "h200-sxm", "--format", "json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["refused"] in first and told["devices"][0]["devices"] == 4
