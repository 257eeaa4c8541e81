from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.messages import Counters, LinkState
from kvrelay.types import Incarnation, Role
from router.candidate import Candidate
from router.directory import Directory
from router.forecast.decode_outlook import BatchThen, DecodeOutlook, Expected
from router.forecast.forecast import Forecast
from router.forecast.prefill_queue import Ahead, PrefillQueue
from router.forecast.step_peaks import StepPeaks
from router.prefixes import HeldPrefixes
from router.view import WorkerView
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
    p.times, d.times = PerToken(prompt_s=0.01), PerToken(sequence_s=0.1, context_s=0.001)
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
    p.times, d.times = PerToken(prompt_s=0.01), PerToken(sequence_s=0.1)
    p.queue.add(key("x"), Ahead(seconds=2, tokens=5), 0)
    p.counters = Counters(prefill_waiting_tokens=25)
    d.counters = Counters(running=3, active_blocks=6)
    found = Forecast(workers_of(p, d)).predict(demand(), Candidate(decode=d, prefill=p), 0)
    assert found.prompt.queue_s == pytest.approx(2 + 20 * 0.01)
    assert found.decode.batch == BatchThen(3, 24)


def test_a_decode_worker_that_prefills_does_both_in_its_steps() -> None:
    d = view("d", D)
    d.times = PerToken(prompt_s=0.01, sequence_s=0.1)
    d.outlook.add(key("x"), expect(0, 60, choices=2))
    asked = demand(prompt_tokens=16)
    found = Forecast(workers_of(d)).predict(asked, Candidate(decode=d, prefill=None), 0)
    assert found.prompt.prefill_s == pytest.approx(0.16 + 2 * 2 * 0.1)


def test_more_sequences_than_places_take_no_longer_steps() -> None:
    """Those that tiers have places of their own for may come while all places are lent."""
    both, asked = view("both", Role.BOTH, places=2), demand(prompt_tokens=16)
    both.times = PerToken(prompt_s=0.01, sequence_s=0.1, context_s=0.001)
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
