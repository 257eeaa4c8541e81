"""Steps launched ahead on a CUDA device: by recorded steps and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

import engine.sampler
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


def test_draws_that_come_late_are_the_same(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = Sampling(max_tokens=TOKENS, seed=1, temperature=1.5)
    asked = requests([hot, replace(hot, logprobs=2), SAMPLINGS["greedy"], hot])
    plain = run(loaded, asked, ahead=False)
    monkeypatch.setattr(engine.sampler, "_HEAD", 5)
    ahead = run(loaded, asked, ahead=True)
    assert ahead.late > 20 and ahead.behind > 20
    assert [t.ids for t in ahead.told.values()] == [t.ids for t in plain.told.values()]
