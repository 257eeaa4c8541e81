"""Steps launched ahead on a CUDA device: by recorded steps and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.runner import Engine
from kvrelay.types import Sampling
from tests.unit.test_launch_ahead import AHEAD, TOKENS, requests, run, stopping
from tests.unit.test_resuming import SAMPLINGS, engine_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["triton", "sdpa"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of(tmp_path_factory, "llama", attention=request.param, device="cuda")


def test_tokens_are_those_of_single_steps(loaded: Engine) -> None:
    asked = requests(stopping([SAMPLINGS[name] for name in AHEAD] * 2))
    plain, ahead = (run(loaded, asked, ahead=flag) for flag in (False, True))
    assert [t.ids for t in ahead.told.values()] == [t.ids for t in plain.told.values()]
    assert ahead.behind > 0


def test_hot_draws_are_launched_ahead_too(loaded: Engine) -> None:
    hot = Sampling(max_tokens=TOKENS, seed=1, temperature=1.5)
    asked = requests([hot, replace(hot, logprobs=2), replace(hot, top_p=0.9), hot])
    plain, ahead = (run(loaded, asked, ahead=flag) for flag in (False, True))
    assert [t.ids for t in ahead.told.values()] == [t.ids for t in plain.told.values()]
    assert ahead.behind > 20
