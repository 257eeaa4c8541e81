"""What a router expects of workers and of requests, and how far that was off."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from engine.core.step_times import decode_work, prefill_work
from kvrelay.counters import Counters
from kvrelay.types import FinishReason, Incarnation, Objectives, Role
from router.core.core import RouterCore
from router.core.events import Submitted
from router.core.learning import MAX_LATENESS
from router.core.load.output_lengths import OutputLengths
from router.core.load.step_times import WorkerTimes
from router.core.request import Request
from router.core.state.worker_view import Delay
from tests.unit.router_kit import hello, request, reserved, says, split, submit, tokens


def times(prefill: float = 1.0, decode: float = 1.0) -> WorkerTimes:
    counters = Counters(prefill_correction=prefill, decode_correction=decode)
    return WorkerTimes.of(hello("w", Role.BOTH)).corrected(counters)


def test_times_are_the_hellos_multiplied_by_the_latest_corrections() -> None:
    plain, slow = times(), times(prefill=2.0, decode=3.0)
    prompt, decode = prefill_work(8), decode_work(2, 100)
    assert slow.step_s(prompt) == pytest.approx(2 * plain.step_s(prompt))
    assert slow.step_s(decode) == pytest.approx(3 * plain.step_s(decode))
    extra_s = plain.step_s(prompt + decode) - plain.step_s(prompt)
    assert slow.step_s(prompt + decode) == pytest.approx(2 * plain.step_s(prompt) + 3 * extra_s)


# --- output lengths ------------------------------------------------------------------------------


def learnt(*ended: int, cut: tuple[int, ...] = ()) -> OutputLengths:
    lengths = OutputLengths()
    for tokens_ in ended:
        lengths.observe("free", tokens_, was_cut=False)
    for tokens_ in cut:
        lengths.observe("free", tokens_, was_cut=True)
    return lengths


def test_before_any_end_a_guess_is_expected_within_max_tokens() -> None:
    assert OutputLengths().quantile("free", 0.5, max_tokens=10_000) == 256
    assert OutputLengths().quantile("free", 0.5, max_tokens=77) == 77
    assert learnt(cut=(5, 5, 5)).quantile("free", 0.5, max_tokens=77) == 77
    assert learnt(5).quantile("premium", 0.5, max_tokens=77) == 77


def test_quantiles_are_within_a_band() -> None:
    lengths = learnt(*Random(0).sample(range(1, 401), 400))
    for share, exact in ((0.02, 8), (0.5, 200), (0.9, 360)):
        found = lengths.quantile("free", share, max_tokens=1000)
        assert exact * 0.9 <= found <= exact * 1.2, (share, found)
    assert lengths.quantile("free", 0.9, max_tokens=100) == 100


def test_requests_that_were_cut_count_as_longer() -> None:
    """Half of all are cut at 10 tokens, as likely to be long as the others."""
    random = Random(1)
    lengths = OutputLengths()
    for i in range(4000):
        drawn = random.randint(1, 100)
        limit = 10 if i % 2 else 1000
        lengths.observe("free", min(drawn, limit), was_cut=drawn > limit)
    assert 45 <= lengths.quantile("free", 0.5, max_tokens=1000) <= 62


def test_a_request_that_has_gone_on_is_expected_to_go_on() -> None:
    lengths = learnt(*[5] * 90, *[200] * 10)
    assert lengths.quantile("free", 0.5, max_tokens=1000) == 5
    assert 200 <= lengths.quantile("free", 0.5, max_tokens=1000, emitted=5) <= 216
    assert lengths.quantile("free", 0.5, max_tokens=1000, emitted=500) == 1000
    assert lengths.quantile("free", 0.5, max_tokens=1000, emitted=3) == 5


def test_old_lengths_fade_and_memory_stays() -> None:
    lengths = learnt(*[10] * 3000, *[100] * 3000)
    assert 100 <= lengths.quantile("free", 0.1, max_tokens=1000) <= 108
    for _ in range(200_000):  # the weights are scaled down on the way
        lengths.observe("free", 12, was_cut=False)
    assert lengths.quantile("free", 0.99, max_tokens=1000) == 12


def test_how_many_of_those_that_decode_will_go_on() -> None:
    lengths = learnt(*[40] * 50, *[400] * 50)
    survival = lengths.survival("free")
    assert survival is not None
    found = [survival.goes_on(*one) for one in ((0, 24), (0, 100), (100, 200), (100, 400))]
    assert found == pytest.approx([1, 0.5, 1, 0], abs=0.03)  # later ones weigh more
    assert survival.goes_on(800, 800) == 0.5, "it has outlived all that are known"


def test_those_that_were_cut_go_on_for_all_that_is_known() -> None:
    assert OutputLengths().survival("free") is None
    assert learnt(cut=(40, 40)).survival("free") is None
    survival = learnt(40, 40, cut=(100, 100)).survival("free")
    assert survival is not None
    assert survival.goes_on(0, 90) == survival.goes_on(0, 10_000) == pytest.approx(0.5, abs=0.01)


def test_very_long_outputs_have_a_band() -> None:
    lengths = learnt(10**7)
    assert lengths.quantile("free", 0.5, max_tokens=2000) == 2000
    assert lengths.quantile("free", 0.5, max_tokens=10**8) > 10**5
    survival = lengths.survival("free")
    assert survival is not None and survival.goes_on(0, 2000) == 1


# --- errors --------------------------------------------------------------------------------------


def follow(core: RouterCore) -> Request:
    """A request of 5 tokens: the first after 2 s, the last after 10 s."""
    submit(core, now_s=0)
    says(core, "d", reserved())
    request = core.state.requests["r"]
    assert request.predicted is not None
    request.predicted = replace(request.predicted, ttft_s=1.0, tpot_s=3.0)
    return request


def test_errors_are_predicted_by_actual_seconds() -> None:
    core = split()
    request = follow(core)
    assert request.prediction_errors() == {}
    says(core, "p", tokens(0, 7), now_s=2.0)
    assert request.prediction_errors() == {"ttft": 0.5}
    for index in range(1, 5):
        says(core, "d", tokens(index, 7), now_s=2.0 + 2 * index)
    assert request.prediction_errors() == {"ttft": 0.5, "tpot": 1.5}


def test_a_request_that_was_run_again_says_nothing() -> None:
    core = split()
    request = follow(core)
    says(core, "p", tokens(0, 7), now_s=2.0)
    request.try_again(7)
    assert request.prediction_errors() == {}


def test_without_a_prediction_there_is_no_error() -> None:
    core = split()
    follow(core).predicted = None
    says(core, "p", tokens(0, 7), now_s=2.0)
    assert core.state.requests["r"].prediction_errors() == {}


def test_what_a_token_took_is_compared_with_the_batch_as_it_grew() -> None:
    """It was admitted alone, and shared its steps with another: the router had expected that."""
    core = split()
    submit(core, "r")
    alone_s = core.state.requests["r"].predicted.tpot_s  # type: ignore[union-attr]
    submit(core, "other", now_s=1.1)
    grown_s = core.state.requests["other"].predicted.decode.step_s  # type: ignore[union-attr]
    says(core, "d", reserved())
    says(core, "p", tokens(0, 5))
    says(core, "d", tokens(1, 5, 5, 5, 5, 5, 5, 5, reason=FinishReason.LENGTH), now_s=3)
    assert "r" not in core.state.requests
    assert core.state.forecast.tpot.usual_s == pytest.approx(grown_s, rel=0.2)
    assert core.state.forecast.tpot.usual_s > 1.2 * alone_s


def margin_of(ended_s: float, stood_back_s: float) -> float:
    """Of a request of eight tokens, the first after 2 s."""
    core = split()
    submit(core, "r")
    says(core, "d", reserved())
    says(core, "p", tokens(0, 5))
    last = tokens(1, 5, 5, 5, 5, 5, 5, 5, reason=FinishReason.LENGTH)
    says(core, "d", replace(last, stood_back_s=stood_back_s), now_s=ended_s)
    assert "r" not in core.state.requests
    (errors,) = core.state.forecast.tpot._bands.values()
    return errors.total


def test_to_have_stood_back_for_others_is_no_want_of_speed() -> None:
    assert margin_of(2.25, 0.125) == margin_of(2.125, 0.0) != margin_of(2.25, 0.0)


def learnt_ttft_s(first_s: float, objective_s: float | None) -> float:
    """The time to first token that is expected after a request that came at 1 s, and whose first
    token is there `first_s` later: what it took beyond its prompt is the delay of messages."""
    core = split()
    asked = replace(request("r"), objectives=Objectives(ttft_s=objective_s))
    core.handle(Submitted(request=asked), 1.0)
    predicted = core.state.requests["r"].predicted
    assert predicted is not None
    says(core, "d", reserved(), now_s=1.0)
    says(core, "p", tokens(0, 5), now_s=1.0 + first_s)
    delay_s = core.state.workers[Incarnation("p")].dispatching.usual_s
    return delay_s + predicted.prompt.first_token_s


def test_who_came_too_late_counts_as_a_tenth_too_late() -> None:
    """It went behind all that could be in time: that is no error of the prediction."""
    assert learnt_ttft_s(0.9, 1.0) == pytest.approx(0.9)
    assert learnt_ttft_s(3.0, 1.0) == pytest.approx(1.0 * MAX_LATENESS)
    assert learnt_ttft_s(3.0, None) == pytest.approx(3.0), "nothing was to be kept"


def test_a_moment_counts_once_however_many_it_held_up() -> None:
    delay = Delay()
    for second in range(9):
        delay.observe(0.01, float(second))
    for late in range(20):
        delay.observe(0.5, 9.0 + late / 100)
    assert delay.usual_s == 0.01
    for second in range(10, 14):
        delay.observe(0.5, float(second))
    assert delay.usual_s == 0.5, "it lasts"


def test_of_a_moment_the_soonest_counts() -> None:
    delay = Delay()
    for seconds in (0.3, 0.1, 0.2):
        delay.observe(seconds, 1.0)
    assert delay.usual_s == 0.1
