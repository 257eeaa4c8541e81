from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.counters import Counters
from kvrelay.types import Incarnation, Objectives, RequestKey, Role
from router.core.core import RouterCore
from router.core.events import Submitted, WorkerJoined
from router.core.load.decode_outlook import Expected
from router.core.policy.admission_baselines import Unlimited
from router.core.policy.choice import Policies
from router.core.promises.work import Promised
from router.core.router_state import RouterState
from router.core.start import Beginning, begin
from router.core.workers import Workers
from tests.unit.router_kit import STEP_TIMES, PerToken, hello, request

NOTHING_KNOWN = replace(STEP_TIMES, decode_knots=())


def workers(*longest: tuple[Role, int]) -> Workers:
    joined = Workers()
    for i, (role, tokens) in enumerate(longest):
        joined.join(hello(f"w{i}", role, max_model_len=tokens, places=i + 1))
    return joined


@pytest.mark.parametrize(
    ("longest", "tokens"),
    [
        ([], 0),
        ([(Role.PREFILL, 9)], 0),
        ([(Role.DECODE, 9)], 0),
        ([(Role.PREFILL, 9), (Role.DECODE, 7)], 7),
        ([(Role.PREFILL, 5), (Role.PREFILL, 6), (Role.DECODE, 7)], 6),
        ([(Role.PREFILL, 9), (Role.DECODE, 7), (Role.BOTH, 8)], 8),
    ],
)
def test_the_longest_sequence_is_what_a_pair_or_one_of_both_can_hold(
    longest: list[tuple[Role, int]], tokens: int
) -> None:
    assert workers(*longest).longest_tokens == tokens


def test_decode_workers_that_prefill_too_need_no_others() -> None:
    alone = begin(Beginning(policies=Policies(local_prefill=True))).state.workers
    assert alone.longest_tokens == 0
    alone.join(hello("p", Role.PREFILL, max_model_len=5))
    assert alone.longest_tokens == 0
    alone.join(hello("d", Role.DECODE, max_model_len=7))
    assert alone.longest_tokens == 7
    in_turn = Policies(local_prefill=True, placement="round_robin")
    split = begin(Beginning(policies=in_turn)).state.workers
    split.join(hello("d", Role.DECODE, max_model_len=7))
    assert split.longest_tokens == 0, "only kv_aware suggests them"


@pytest.mark.parametrize(
    ("tpot_s", "strictest_s"), [(None, None), (0.09, None), (0.1, 0.1), (0.5, 0.5)]
)
def test_nobody_is_refused_for_a_pace_that_no_one_could_keep(
    tpot_s: float | None, strictest_s: float | None
) -> None:
    """One sequence takes 100 ms a step. Who admits whatever comes takes the impossible too."""
    core = RouterCore(RouterState(admitting=Unlimited()))
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role)), 0)
    decode = core.state.workers[Incarnation("d")]
    decode.times = PerToken(sequence_s=0.1)
    asked = replace(request(), objectives=Objectives(tpot_s=tpot_s))
    core.handle(Submitted(request=asked), 1)
    assert decode.outlook.sequences == 1
    assert decode.outlook.strictest_tpot_s == strictest_s


def test_a_pace_counts_where_nothing_is_known_of_steps() -> None:
    core = RouterCore(RouterState(admitting=Unlimited()))
    core.handle(WorkerJoined(hello=replace(hello("b", Role.BOTH), step_times=NOTHING_KNOWN)), 0)
    asked = replace(request(), objectives=Objectives(tpot_s=0.01))
    core.handle(Submitted(request=asked), 1)
    assert core.state.workers[Incarnation("b")].outlook.strictest_tpot_s == 0.01


def test_a_model_is_known_before_it_can_be_served() -> None:
    assert workers().model() is None
    alone = workers((Role.PREFILL, 9)).model()
    assert alone is not None
    assert (alone.architecture, alone.max_model_len) == ("Llama", 9)
    pair = workers((Role.PREFILL, 9), (Role.DECODE, 7)).model()
    assert pair is not None
    assert pair.max_model_len == 7


def test_what_is_promised_counts_with_what_other_routers_have_promised() -> None:
    joined = workers((Role.PREFILL, 9), (Role.DECODE, 7), (Role.DECODE, 7))
    one = Promised(prefill_s=1.0, sequences=2.0, kv_tokens=10.0)
    halved = Promised(prefill_s=1.0, sequences=1.0, kv_tokens=5.0)
    assert joined.per_worker(one) == halved
    decode = joined[Incarnation("w1")]
    decode.outlook.add(RequestKey("mine", 0), Expected(joins_s=0, ends_s=9, tokens=5, choices=2))
    assert joined.all_by_own() == 1
    decode.said(Counters(running=3, routers=3))
    joined[Incarnation("w2")].said(Counters(running=3, routers=3))
    assert joined.all_by_own() == 3


def test_the_most_places_are_those_of_one_worker_that_decodes() -> None:
    assert workers().most_places == 0
    assert workers((Role.DECODE, 9), (Role.PREFILL, 9)).most_places == 1
    assert workers((Role.BOTH, 9), (Role.BOTH, 9)).most_places == 2
