"""Several ranks or stages, each on a GPU of its own, against the model's own forward pass; and KV
between them and one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from tests.drive import run_mixed, start
from tests.models import random_checkpoint
from tests.reference import assert_same_tokens
from tests.unit.test_launch_ahead import requests, run
from tests.unit.test_parallel import (
    CHUNK_TOKENS,
    LIMITS,
    TOKENS,
    Case,
    Kind,
    handed_over,
    ranks,
    references,
)
from tests.unit.test_pipeline import TURNS
from tests.unit.test_resuming import SAMPLINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
_KINDS = {
    "llama": Kind("llama"),
    "llama, one head twice": Kind("llama", changes={"num_key_value_heads": 1}),
    "gemma2": Kind("gemma2"),
    "mixtral": Kind("mixtral"),
}
_STAGES = {
    "llama, two stages": Kind("llama", changes={"num_hidden_layers": 4}),
    "gemma2, two stages": Kind("gemma2", changes=TURNS),
}


@pytest.fixture(scope="module", params=sorted(_KINDS | _STAGES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    kind, folder = (_KINDS | _STAGES)[request.param], tmp_path_factory.mktemp("model")
    random_checkpoint(folder, kind.family, **kind.changes)
    stages = 2 if request.param in _STAGES else 1
    engine = ranks(folder, 2 // stages, stages=stages, device="cuda")
    yield Case(kind, folder, engine, references(folder))
    engine.close()


def test_tokens_in_mixed_batches(case: Case) -> None:
    sequences = start(case.engine, [r.prompt for r in case.references], max_tokens=TOKENS)
    run_mixed(case.engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(case.references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)


def test_a_prompt_goes_to_one_rank_and_back(case: Case) -> None:
    one = load_engine(
        open_checkpoint(str(case.folder)),
        device="cuda:0",
        dtype="float32",
        block_size=16,
        blocks=48,
        limits=LIMITS,
    )
    for first, second in ((case.engine, one), (one, case.engine)):
        for reference in case.references:
            handed = handed_over(first, second, reference.prompt)
            assert_same_tokens(reference, handed.emitted)


def test_steps_of_several_ranks_are_recorded(case: Case) -> None:
    assert (case.engine.graphs is None) == (case.engine.stages > 1)


def test_steps_launched_ahead_give_the_same_tokens(case: Case) -> None:
    if not case.engine.can_follow:
        pytest.skip("stages follow no tokens that are not known")
    asked = requests([SAMPLINGS["greedy"], SAMPLINGS["seeded"]] * 2)
    plain, ahead = (run(case.engine, asked, ahead=flag) for flag in (False, True))
    assert ahead.behind > ahead.launched / 3
    for name, told in plain.told.items():
        assert ahead.told[name].ids == told.ids
