"""`kvrelay plan` advises the ranks and stages with which a worker starts, and no others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.sim.planning.model_facts import find_facts
from cluster.sim.profiles.capacity import STAGE_COUNTS, TENSOR_DEGREES, Refusals
from cluster.sim.profiles.load import _bundled, known_refusals, model_names
from engine.family import share
from engine.family.startable import parallel_refusals
from engine.model.checkpoint import open_checkpoint
from engine.parallel.grid import Grid
from engine.parallel.opening import OwnRank
from kvrelay.errors import ModelError
from tests.families.kit import write_no_weights, write_weights
from tests.families.walk import family_folder
from tests.models import FAMILIES, random_checkpoint

_LONGEST = 1024
_BY_CONFIGURATION = ("glm_moe_dsa", "bloom", "qwen3_next", "kimi_linear")
_OTHERS = ("deepseek_v2", "deepseek_v3", "minicpm3", "minimax_m2", "granitemoe")


RefusalOf = Callable[..., str]
"""Of a folder, a number of ranks and one of stages."""


@dataclass
class Silent:
    """Rank 0's group, whose other ranks add nothing."""

    size: int
    rank: int = 0
    can_record: bool = False

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        return torch.nn.functional.pad(part, (0, outputs - part.shape[-1]))


@pytest.fixture
def refusal_of(monkeypatch: pytest.MonkeyPatch) -> RefusalOf:
    """Why rank 0 of a worker with so many ranks doesn't start; empty: it does. All its checks run
    but comparisons of logits."""
    for compares in ("check_split", "check_stages_of_copy"):
        monkeypatch.setattr(share, compares, lambda *_: None)

    def start(folder: Path, degree: int, stages: int = 1) -> str:
        group: Any = Silent(degree) if degree > 1 else None
        line: Any = SimpleNamespace() if stages > 1 else None
        own = OwnRank(rank=0, grid=Grid(tensor=degree, stages=stages), group=group, line=line)
        ranks = None if own.grid.size == 1 else own
        try:
            checkpoint = open_checkpoint(str(folder))
            loaded = share.load_share(checkpoint, device="cpu", dtype="float32", own=ranks)
            share.check_share(loaded, _LONGEST, ranks)
        except ModelError as error:
            return str(error)
        return ""

    return start


def family(folder: Path, name: str) -> Path:
    if name in FAMILIES:
        return random_checkpoint(folder, name)
    family_folder(folder, name)
    (write_no_weights if name in _BY_CONFIGURATION else write_weights)(folder)
    return folder


@pytest.mark.parametrize("name", [*FAMILIES, *_OTHERS, *_BY_CONFIGURATION])
def test_advised_degrees_are_those_that_a_worker_starts(
    name: str, tmp_path: Path, refusal_of: RefusalOf
) -> None:
    """The reasons are its own words too."""
    folder = family(tmp_path, name)
    found = find_facts(str(folder)).refusals
    said = {degree: refusal_of(folder, degree) for degree in TENSOR_DEGREES}
    staged = {count: refusal_of(folder, 1, count) for count in STAGE_COUNTS}
    if found.refused:
        assert {*said.values(), *staged.values()} == {found.refused}
    else:
        assert found.unsplit == {degree: why for degree, why in said.items() if why}
        assert found.unstaged == {count: why for count, why in staged.items() if why}


def test_there_are_models_of_every_kind(tmp_path: Path) -> None:
    found = {}
    for name in ("llama", "deepseek_v2", "deepseek_v3", "gpt_oss", "bloom"):
        (tmp_path / name).mkdir()
        found[name] = find_facts(str(family(tmp_path / name, name))).refusals
    assert found["llama"].degrees == found["deepseek_v2"].degrees == (1, 2, 4)
    assert found["deepseek_v3"].degrees == found["gpt_oss"].degrees == (1,)
    assert len(set(found["gpt_oss"].unsplit.values())) == 1, "its heads are not the reason"
    assert found["bloom"].refused
    assert found["gpt_oss"].stages == (1,), "each of two stages would have one kind of layer"
    assert found["llama"].stages == found["deepseek_v3"].stages == (1, 2)


def test_layers_that_do_not_divide_leave_one_rank(tmp_path: Path, refusal_of: RefusalOf) -> None:
    folder = random_checkpoint(tmp_path, "llama", intermediate_size=97)
    found = find_facts(str(folder)).refusals
    assert found.degrees == (1,)
    assert found.unsplit[2] == refusal_of(folder, 2) and "mlp.gate_proj" in found.unsplit[2]


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "kimi_k2"},
    ],
)
def test_a_configuration_is_refused_as_a_worker_does(
    changes: dict[str, object], tmp_path: Path, refusal_of: RefusalOf
) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    if "text_config" in changes:
        inner = json.loads((folder / "config.json").read_text())
        changes = {"text_config": {**inner, **changes["text_config"]}}
    change_config(folder, **changes)
    found = find_facts(str(folder)).refusals
    assert found.refused and found.refused == refusal_of(folder, 1)


def test_quantised_weights_that_no_configuration_mentions_are_refused(
    tmp_path: Path, refusal_of: RefusalOf
) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    path = folder / "model.safetensors"
    eight = {name: one.to(torch.float8_e4m3fn) for name, one in load_file(path).items()}
    save_file(eight, path, metadata={"format": "pt"})
    found = find_facts(str(folder)).refusals
    assert "F8_E4M3" in found.refused and found.refused == refusal_of(folder, 1)


def test_a_refusal_comes_before_what_a_shape_lacks(tmp_path: Path) -> None:
    family(tmp_path, "mamba")
    with pytest.raises(ModelError, match=r"the mamba family can't be served \(interface check\)"):
        find_facts(str(tmp_path))


@pytest.mark.parametrize("name", model_names())
def test_what_is_written_of_a_known_shape_is_what_the_checks_say(name: str, tmp_path: Path) -> None:
    config = {"architectures": ["ItForCausalLM"], **_bundled("models.yaml")[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        unsplit, unstaged = parallel_refusals(tmp_path, TENSOR_DEGREES, STAGE_COUNTS)
        found = Refusals(unsplit=unsplit, unstaged=unstaged)
    except ModelError as error:
        found = Refusals(refused=str(error))
    assert known_refusals(name) == found


def test_a_known_shape_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['kvrelay', 'plan', 'opt-66b', '--gpus', 'h200-sxm']\n"
        "from cluster.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
