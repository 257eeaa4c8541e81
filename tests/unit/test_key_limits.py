"""What an API key may ask for: token buckets of a minute, and requests at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import Refused
from router.access.limits import UNLIMITED, Allowance, Booking, Limits, Meter


def begun(meter: Meter, now_s: float, *, goes_on: bool = False) -> Booking:
    booking = Booking(meter)
    booking.begin(now_s, goes_on=goes_on)
    return booking


def test_requests_of_a_minute_may_come_at_once_and_come_back_one_by_one() -> None:
    meter = Meter(Limits(requests_per_minute=6))
    for _ in range(6):
        begun(meter, 100.0).settle(0, 100.0)
    with pytest.raises(Refused, match=r"6 requests a minute: come back in 10\.0 s") as refused:
        begun(meter, 100.0)
    assert refused.value.reason == "key_requests_exhausted"
    assert refused.value.retry_after_s == pytest.approx(10.0)
    begun(meter, 110.01)
    with pytest.raises(Refused):
        begun(meter, 110.01)


def test_who_comes_at_the_time_that_a_refusal_names_gets_in() -> None:
    meter = Meter(Limits(requests_per_minute=7, tokens_per_minute=1000))
    booking = begun(meter, 0.0)
    booking.pay(1000, 0.0)
    booking.settle(333, 5.0)
    with pytest.raises(Refused) as refused:
        begun(meter, 5.0)
    assert refused.value.reason == "key_tokens_exhausted"
    assert refused.value.retry_after_s is not None
    begun(meter, 5.0 + refused.value.retry_after_s + 1e-6)


def test_generated_tokens_are_paid_at_the_end_into_debt() -> None:
    meter = Meter(Limits(tokens_per_minute=600))
    booking = begun(meter, 0.0)
    booking.pay(100, 0.0)
    begun(meter, 0.0).pay(500, 0.0)
    booking.settle(300, 0.0)
    with pytest.raises(Refused) as refused:
        begun(meter, 0.0)
    assert refused.value.retry_after_s == pytest.approx(30.1), "300 of debt, and one token"


def test_a_prompt_of_more_than_a_minute_needs_the_whole_allowance() -> None:
    meter = Meter(Limits(tokens_per_minute=100))
    begun(meter, 0.0).pay(10, 0.0)
    late = begun(meter, 0.0)
    with pytest.raises(Refused) as refused:
        late.pay(1000, 0.0)
    assert refused.value.retry_after_s == pytest.approx(6.0)
    late.pay(1000, 6.001)
    late.settle(0, 6.001)
    with pytest.raises(Refused) as refused:
        begun(meter, 6.001)
    assert refused.value.retry_after_s == pytest.approx(60 * 9.01, rel=1e-3)


def test_a_request_that_was_not_admitted_costs_nothing() -> None:
    meter = Meter(Limits(requests_per_minute=1, tokens_per_minute=50, concurrent_requests=1))
    for _ in range(3):
        booking = begun(meter, 0.0)
        booking.pay(50, 0.0)
        booking.cancel(0.0)
        booking.cancel(0.0)
        booking.settle(1000, 0.0)
    assert meter.running == 0


def test_what_was_computed_of_a_prompt_that_did_not_come_whole_is_paid() -> None:
    meter = Meter(Limits(tokens_per_minute=60))
    booking = begun(meter, 0.0)
    booking.pay(60, 0.0)
    booking.computed_tokens = 40
    booking.cancel(0.0)
    other = begun(meter, 0.0)
    other.pay(20, 0.0)
    with pytest.raises(Refused):
        other.pay(21, 0.0)


def test_at_once() -> None:
    meter = Meter(Limits(concurrent_requests=2))
    first, _ = begun(meter, 0.0), begun(meter, 0.0)
    with pytest.raises(Refused, match="may have 2 requests at once, and has 2") as refused:
        begun(meter, 0.0)
    assert refused.value.reason == "key_concurrency_exhausted"
    assert refused.value.retry_after_s == 1.0
    first.settle(1, 0.0)
    begun(meter, 0.0)


def test_one_that_another_router_admitted_goes_on_up_to_a_second_allowance() -> None:
    meter = Meter(Limits(requests_per_minute=2, concurrent_requests=2))
    for _ in range(2):
        begun(meter, 0.0)
    with pytest.raises(Refused):
        begun(meter, 0.0)
    for _ in range(2):
        begun(meter, 0.0, goes_on=True)
    with pytest.raises(Refused, match="at once"):
        begun(meter, 0.0, goes_on=True)
    meter.change(Limits(requests_per_minute=2), 0.0)
    with pytest.raises(Refused, match="a minute"):
        begun(meter, 0.0, goes_on=True)


def test_what_was_used_stays_used_when_limits_change() -> None:
    meter = Meter(Limits(requests_per_minute=2))
    for _ in range(2):
        begun(meter, 0.0)
    meter.change(Limits(requests_per_minute=4), 0.0)
    for _ in range(2):
        begun(meter, 0.0)
    with pytest.raises(Refused):
        begun(meter, 0.0)
    meter.change(UNLIMITED, 0.0)
    begun(meter, 0.0)
    meter.change(Limits(requests_per_minute=1), 0.0)
    begun(meter, 0.0)


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 30), st.floats(-5, 50)), max_size=30),
)
def test_a_bucket_never_holds_more_than_a_minute_nor_gives_more_than_its_rate(
    per_minute: int, steps: list[tuple[float, float]]
) -> None:
    bucket, now_s, taken = Allowance(per_minute), 0.0, 0.0
    for wait_s, amount in steps:
        now_s += wait_s
        if bucket.wait_s(amount, now_s) == 0.0 and amount > 0:
            bucket.take(amount, now_s)
            taken += amount
        assert bucket.level <= per_minute
    over = max((amount for _, amount in steps), default=0.0)
    assert taken <= per_minute * (1 + now_s / 60) + max(0.0, over) + 1e-6
