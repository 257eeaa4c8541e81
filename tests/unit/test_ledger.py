from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.request import PHASES, Ledger


def test_phases_are_the_gaps_in_order_after_those_of_the_face() -> None:
    ledger = Ledger(before_s={"receive": 0.5, "tokenize": 0.25}, submitted_s=10)
    for moment, at_s in (
        ("placed", 10.0),
        ("reserved", 11.0),
        ("prefill_received", 11.5),
        ("prefill_started", 12.0),
        ("first_token", 14.0),
        ("first_token_received", 14.25),
        ("handoff_committed", 14.75),
        ("decode_joined", 15.0),
        ("last_token", 20.0),
        ("last_token_received", 20.5),
    ):
        ledger.mark(moment, at_s)
    assert list(ledger.phases().items()) == [
        ("receive", 0.5),
        ("tokenize", 0.25),
        ("place", 0.0),
        ("reserve", 1.0),
        ("dispatch", 0.5),
        ("prefill_queue", 0.5),
        ("prefill", 2.0),
        ("first_token_return", 0.25),
        ("handoff", 0.5),
        ("decode_queue", 0.25),
        ("decode", 5.0),
        ("last_token_return", 0.5),
    ]


def test_the_first_of_a_moment_counts_the_last_of_the_last_token() -> None:
    ledger = Ledger(before_s={}, submitted_s=0)
    for at_s in (1.0, 2.0, 3.0):
        ledger.mark("first_token", at_s)
        ledger.mark("last_token", at_s)
        ledger.mark("prefill_chunk", at_s)  # not a border of a phase
    assert ledger.phases() == {"prefill": 1.0, "decode": 2.0}


def test_a_moment_dated_late_by_a_slow_reader_does_not_pass_those_after_it() -> None:
    ledger = Ledger(before_s={}, submitted_s=0)
    ledger.mark("reserved", 5.0)
    ledger.mark("first_token", 3.0)
    ledger.mark("last_token_received", 6.0)
    assert ledger.phases() == {"reserve": 3.0, "prefill": 0.0, "last_token_return": 3.0}


@given(
    moments=st.dictionaries(st.sampled_from(sorted(PHASES)), st.floats(-5, 100)),
    end_s=st.floats(100, 200),
)
def test_phases_sum_to_the_whole_and_none_is_negative(
    moments: dict[str, float], end_s: float
) -> None:
    ledger = Ledger(before_s={"receive": 1.0}, submitted_s=0)
    for moment, at_s in moments.items():
        if moment != "last_token_received":
            ledger.mark(moment, at_s)
    ledger.mark("last_token_received", end_s)
    phases = ledger.phases()
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(1.0 + end_s)
