from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.counters import Counters, LinkState
from kvrelay.messages import Lifetime
from kvrelay.types import Incarnation, Role
from router.core.load.decode_outlook import (
    FRESH_S,
    BatchThen,
    DecodeOutlook,
    Expected,
    Lifetimes,
    StepPeaks,
)
from router.core.load.output_lengths import OutputLengths, Survival
from router.core.load.prefill_queue import Ahead, PrefillQueue
from router.core.policy.forecast import CONFIDENCE, Forecast, open_forecast
from router.core.state.candidate import Candidate
from router.core.state.demand import HeldPrefixes
from router.core.state.directory import Directory
from router.core.state.worker_view import WorkerView
from tests.unit.router_kit import PerToken, demand, hello, key, view, workers_of

P, D = Role.PREFILL, Role.DECODE


# --- the queue of a prefill worker ----------------------------------------------------------------


def test_work_ahead_shrinks_while_the_worker_works() -> None:
    queue = PrefillQueue()
    queue.add(key("a"), Ahead(seconds=2, tokens=20), now_s=10)
    queue.add(key("b"), Ahead(seconds=3, tokens=30), now_s=10)
    assert queue.wait_s(0, 10) == 5
    assert queue.wait_s(0, 11.5) == 3.5
    assert queue.wait_s(0, 99) == 3, "the first takes longer than was thought; the next won't"
    queue.remove(key("a"), 12.5)
    assert queue.wait_s(0, 12.5) == 3
    queue.remove(key("a"), 12.5)
    queue.remove(key("b"), 13)
    assert (queue.wait_s(0, 13), queue.tokens, len(queue)) == (0, 0, 0)


def test_idle_time_is_not_counted_as_work() -> None:
    queue = PrefillQueue()
    queue.add(key("a"), Ahead(seconds=2, tokens=20), now_s=0)
    queue.remove(key("a"), 1)
    queue.add(key("b"), Ahead(seconds=2, tokens=20), now_s=50)
    assert queue.wait_s(0, 51) == 1


def test_what_has_a_later_priority_is_not_ahead() -> None:
    queue = PrefillQueue()
    queue.add(key("low"), Ahead(seconds=2, tokens=20, priority=5), now_s=0)
    queue.add(key("high"), Ahead(seconds=3, tokens=30, priority=1), now_s=0)
    assert [queue.wait_s(priority, 0) for priority in (0, 1, 4, 5)] == [0, 3, 3, 5]


def test_what_other_routers_have_sent_is_ahead_too() -> None:
    """It may be theirs that the worker works on, until it says that it has begun one of these."""
    queue = PrefillQueue()
    queue.add(key("a"), Ahead(seconds=2, tokens=25, cached=5), now_s=0)
    assert queue.wait_s(0, 1, waiting_tokens=25) == 1, "all that waits there is ours"
    assert queue.wait_s(0, 1, waiting_tokens=50) == pytest.approx(4)
    queue.on_lifetime(Lifetime(key=key("a"), at_s=1, name="prefill_started", tokens=5))
    assert queue.wait_s(0, 1, waiting_tokens=45) == pytest.approx(4)
    queue.on_lifetime(Lifetime(key=key("a"), at_s=1.5, name="prefill_chunk", tokens=10))
    assert queue.wait_s(0, 1.5, waiting_tokens=35) == pytest.approx(3)
    queue.remove(key("a"), 3)
    assert queue.wait_s(0, 3, waiting_tokens=25) == pytest.approx(2)


# --- the batch of a decode worker -----------------------------------------------------------------


def expect(joins_s: float, ends_s: float, choices: int = 1, tokens: int = 10) -> Expected:
    return Expected(joins_s=joins_s, ends_s=ends_s, tokens=tokens, choices=choices)


def test_who_is_there_then() -> None:
    outlook = DecodeOutlook()
    outlook.add(key("a"), expect(0, 10))
    outlook.add(key("b"), expect(5, 20, choices=2))
    assert outlook.at(1, 0) == BatchThen(1, 10)
    assert outlook.at(5, 0) == BatchThen(3, 30)
    assert outlook.at(12, 0) == BatchThen(2, 20)
    assert outlook.at(25, 0) == BatchThen(0, 0)
    assert outlook.at(15, 15) == BatchThen(3, 30), "a was to end at 10 and is still there"
    assert outlook.at(18, 15).sequences == 3
    assert outlook.at(25, 15).sequences == 0, "by then it has probably ended"
    assert (outlook.end_s(1, 0), outlook.end_s(2, 0), outlook.end_s(4, 0)) == (10, 20, None)
    outlook.remove(key("b"))
    outlook.remove(key("b"))
    assert (outlook.sequences, outlook.kv_tokens) == (1, 10)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 3)), max_size=12),
    st.integers(0, 99),
    st.data(),
)
def test_as_counted_one_by_one(
    given_ones: list[tuple[int, int, int]], then: int, data: st.DataObject
) -> None:
    outlook, here = DecodeOutlook(), {}
    for i, (joins, lasts, choices) in enumerate(given_ones):
        here[key(str(i))] = expect(joins, joins + lasts, choices, tokens=7 * i + 1)
        outlook.add(key(str(i)), here[key(str(i))])
    for gone in data.draw(st.sets(st.sampled_from([*here]))) if here else ():
        outlook.remove(gone)
        del here[gone]
    there = [e for e in here.values() if e.joins_s <= then < e.ends_s]
    tokens = sum(e.tokens * e.choices for e in there)
    assert outlook.at(then, -1) == BatchThen(sum(e.choices for e in there), tokens)


def test_as_many_stay_as_outputs_have_lasted() -> None:
    """Half of all have 40 tokens, the others 400; a token takes 0.1 s."""
    outlook, lives = DecodeOutlook(), {"t": Survival([1.0] * 6 + [0.5] * 45 + [0.0])}
    one = Expected(joins_s=0, ends_s=9, tokens=9, prompt_tokens=1000, most_tokens=900, tier="t")
    for i in range(8):
        outlook.add(key(str(i)), replace(one, joins_s=0 if i < 4 else 5))
    for i in range(4):
        outlook.grown(key(str(i)), 100)
    assert outlook.likely(4, 0, 0.1, lives).mean == BatchThen(4, 4 * 1140), "past 40, short of 400"
    assert outlook.likely(8, 0, 0.1, lives).mean == BatchThen(8, 4 * 1180 + 4 * 1030)
    assert outlook.likely(20, 0, 0.1, lives).mean.sequences == 6, "half of those that join later"
    assert outlook.likely(20, 0, 0.1, lives).at_most.sequences == 9, "6 and 3 times 1"
    assert outlook.likely(10, 0, 0.1, lives).at_most.sequences == 8, "6 and 2 times 1"
    assert outlook.likely(4, 0, 0.1, lives).at_most == BatchThen(4, 4 * 1140), "all are certain"
    assert outlook.likely(20, 0, 0.02, lives).mean.sequences == 0
    assert outlook.likely(4, 4, 0.1, {}).mean == outlook.at(4, 4), "nothing is known"
    outlook.add(key("short"), replace(one, joins_s=1, most_tokens=20))
    assert outlook.likely(2.5, 0, 0.1, lives).mean.sequences == 5
    assert outlook.likely(3.5, 0, 0.1, lives).mean.sequences == 4, "it may yield no more"


def test_who_runs_still_was_not_short() -> None:
    """Of five that began together one has ended, at 40 tokens; the others have 200."""
    lengths, outlook = OutputLengths(), DecodeOutlook()
    lifetimes = Lifetimes(lengths)
    for i in range(4):
        outlook.add(key(str(i)), replace(expect(0, 9), tier="t"))
        outlook.grown(key(str(i)), 200)
    assert lifetimes.by_tier([outlook], 0) == {}, "nothing is known"
    lengths.observe("t", 40, was_cut=False)
    assert lifetimes.by_tier([outlook], FRESH_S / 2) == {}, "a moment ago"
    found = lifetimes.by_tier([outlook], FRESH_S)["t"]
    assert found.goes_on(0, 100) == pytest.approx(0.8, abs=0.01)
    outlook.remove(key("0"))
    assert {tier: [*tokens] for tier, tokens in outlook.running()} == {"t": [200] * 3}


def test_the_strictest_objective_counts() -> None:
    outlook = DecodeOutlook()
    assert outlook.strictest_tpot_s is None
    for name, tpot_s in (("a", 0.2), ("b", 0.1), ("c", None)):
        outlook.add(key(name), Expected(joins_s=0, ends_s=1, tokens=1, tpot_s=tpot_s))
    assert outlook.strictest_tpot_s == 0.1
    outlook.remove(key("b"))
    assert outlook.strictest_tpot_s == 0.2


# --- both together --------------------------------------------------------------------------------


def test_a_prediction_adds_up() -> None:
    """Chunks of 8 tokens; 20 tokens at 10 ms; 2 s of queue; a batch of 3 when it joins."""
    p, d = view("p", P), view("d", D)
    p.times, d.times = PerToken(token_s=0.01), PerToken(sequence_s=0.1, context_s=0.001)
    p.queue.add(key("x"), Ahead(seconds=2, tokens=5), 0)
    d.outlook.add(key("x"), expect(2, 60, choices=2, tokens=15))
    d.outlook.add(key("y"), expect(5, 60, tokens=15))
    asked = demand(prompt_tokens=20, output_tokens=9, waited_s=0.5)
    found = Forecast(workers_of(p, d)).predict(asked, Candidate(decode=d, prefill=p), 0)
    assert found.prompt.queue_s == 2
    assert found.prompt.prefill_s == pytest.approx(0.2)
    assert found.ttft_s == pytest.approx(0.5 + 2.2)
    assert found.decode.batch == BatchThen(2, 30)
    assert found.decode.step_s == pytest.approx(3 * 0.1 + (30 + 20 + 5) * 0.001)
    handoff_s = 2e-5
    assert found.tpot_s == pytest.approx(found.decode.step_s + handoff_s / 8), "2 MB at 100 GB/s"
    assert found.completes_in_s == pytest.approx(2.2 + handoff_s + 8 * found.decode.step_s)
    assert found.decode.needed_blocks == 5 + 2  # of four tokens
    assert found.decode.free_blocks == 16 - 8 - 2


class HeldByD(HeldPrefixes):
    def tokens(self, worker: WorkerView) -> int:
        return 12 if worker.incarnation == "d" else 0


def test_a_handoff_goes_on_behind_the_computing() -> None:
    """20 MB at 0.1 GB/s. Of the last chunk's 8 MB, three quarters left before it was computed."""
    p, d = view("p", P), view("d", D)
    link = LinkState(peer=Incarnation("d"), transport="t", bytes_per_s=1e8, latency_s=0.005)
    p.counters = Counters(links=(link,))
    forecast, asked = Forecast(workers_of(p, d)), demand(prompt_tokens=20)
    assert forecast.handoff_s(asked, p, d, prefill_s=1.0) == pytest.approx(0.005 + 0.02)
    assert forecast.handoff_s(asked, p, d, prefill_s=0.15) == pytest.approx(0.005 + 0.05)
    there = HeldByD(asked.spec, Directory())
    asked = replace(asked, held=there)
    assert forecast.handoff_s(asked, p, d, prefill_s=0.0) == pytest.approx(0.005 + 0.08)


def test_what_other_routers_sent_counts_too() -> None:
    p, d = view("p", P), view("d", D)
    p.times, d.times = PerToken(token_s=0.01), PerToken(sequence_s=0.1)
    p.queue.add(key("x"), Ahead(seconds=0.1, tokens=5), 0)
    p.counters = Counters(prefill_waiting_tokens=25)
    d.counters = Counters(running=3, active_blocks=6)
    found = Forecast(workers_of(p, d)).predict(demand(), Candidate(decode=d, prefill=p), 0)
    assert found.prompt.queue_s == pytest.approx(0.1 + 20 * 0.02)
    assert found.decode.batch == BatchThen(3, 24)


def test_a_decode_worker_that_prefills_does_both_in_its_steps() -> None:
    d = view("d", D)
    d.times = PerToken(token_s=0.01, sequence_s=0.1)
    d.outlook.add(key("x"), expect(0, 60, choices=2))
    asked = demand(prompt_tokens=16)
    found = Forecast(workers_of(d)).predict(asked, Candidate(decode=d, prefill=None), 0)
    assert found.prompt.prefill_s == pytest.approx(0.16 + 2 * 2 * 0.1)


def test_more_sequences_than_places_take_no_longer_steps() -> None:
    """Those that tiers have places of their own for may come while all places are lent."""
    both, asked = view("both", Role.BOTH, places=2), demand(prompt_tokens=16)
    both.times = PerToken(token_s=0.01, sequence_s=0.1, context_s=0.001)
    both.outlook.add(key("x"), expect(0, 60, choices=5, tokens=4))
    way = Candidate(decode=both, prefill=None)
    found = Forecast(workers_of(both)).predict(asked, way, 0)
    assert found.prompt.prefill_s == pytest.approx(0.16 + 2 * (2 * 0.1 + 5 * 0.004))
    assert found.decode.batch == BatchThen(5, 20)
    assert found.decode.step_s == pytest.approx(2 * 0.1 + 0.001 * (20 + 16 + 4))


def test_more_sequences_than_were_measured_have_a_time_all_the_same() -> None:
    """Steps are measured with as many as there are places."""
    both = WorkerView.of(hello("both", Role.BOTH, places=4))
    both.outlook.add(key("x"), expect(0, 60, choices=9, tokens=4))
    assert both.decode_s(9, 36) == inf
    way = Candidate(decode=both, prefill=None)
    found = Forecast(workers_of(both)).predict(demand(prompt_tokens=16), way, 0)
    assert 0 < found.prompt.prefill_s < inf
    assert 0 < found.decode.step_s < inf
    assert found.completes_in_s < inf


def test_peaks_are_the_longest_since() -> None:
    peaks = StepPeaks()
    assert peaks.since(0) == 0
    for at_s, step_s in enumerate((3.0, 1.0, 2.0, 2.0, 0.5)):
        peaks.add(step_s, at_s)
    assert [peaks.since(at_s) for at_s in range(6)] == [3.0, 2.0, 2.0, 2.0, 0.5, 0.0]


def test_two_objectives_share_what_may_fail() -> None:
    """Of 100 admitted requests as many keep both of them as CONFIDENCE says."""
    forecast = open_forecast(workers_of(), lambda priority, now_s: 0.0, OutputLengths())
    fail = [1 - margin.confidence for margin in (forecast.ttft, forecast.tpot)]
    assert fail == pytest.approx([(1 - CONFIDENCE) / 2] * 2)
