from __future__ import annotations

import pytest

from kvrelay.messages import Counters
from kvrelay.types import Incarnation, RequestKey, Role
from router.forecast.decode_outlook import Expected
from router.promises import Promised
from router.workers import Workers
from tests.unit.router_kit import hello


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
    assert joined.per_worker(one) == halved
    decode.said(Counters(running=3))
    joined[Incarnation("w2")].said(Counters(running=3))
    assert joined.per_worker(one) == halved.times(3)


def test_the_most_places_are_those_of_one_worker_that_decodes() -> None:
    assert workers().most_places == 0
    assert workers((Role.DECODE, 9), (Role.PREFILL, 9)).most_places == 1
    assert workers((Role.BOTH, 9), (Role.BOTH, 9)).most_places == 2
