"""How many will decode then, by how long outputs have been: with what a decode worker is doing now,
and what its router has learnt."""

from __future__ import annotations

from dataclasses import astuple, replace
from random import Random

import pytest

from kvrelay.counters import Counters
from kvrelay.types import RequestKey, Role
from router.core.load.decode_outlook import BatchThen, DecodeOutlook, Expected, Lifetimes
from router.core.load.output_lengths import STRIDE, OutputLengths, Survival
from router.core.load.sequences import Sequences
from router.core.policy.forecast import Forecast, UsualPrompts
from router.core.state.candidate import DecodePrediction
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView
from tests.unit.router_kit import PerToken, demand, key, view, workers_of

HALF_ARE_SHORT = Survival([1.0] * 6 + [0.5] * 45 + [0.0])
"""They have 40 tokens, the others 400."""
LIVES = {"t": HALF_ARE_SHORT}
TWO_LIVES = {"t": HALF_ARE_SHORT, "u": Survival([1.0, 0.8, 0.3])}
LONG_LIFE = Survival([1.0, 0.7, 0.5, 0.2])
ALL_LONG = {"t": Survival([1.0] * 9 + [0.5]), "u": TWO_LIVES["u"], "x": LONG_LIFE}
ONE = Expected(joins_s=0, ends_s=9, tokens=9, prompt_tokens=100, most_tokens=900, tier="t")


def outlook(*expected: Expected, grown: int = 0) -> DecodeOutlook:
    found = DecodeOutlook()
    for i, one in enumerate(expected):
        found.add(key(str(i)), one)
        if grown:
            found.grown(key(str(i)), grown)
    return found


class TestLikely:
    """Of steps of 0.1 s."""

    def mean(self, found: DecodeOutlook, then_s: float, now_s: float = 0) -> BatchThen:
        return found.likely(then_s, now_s, 0.1, LIVES).mean

    def test_who_has_a_token_is_there_whenever_it_was_to_join(self) -> None:
        early = outlook(replace(ONE, joins_s=5), grown=8)
        assert self.mean(early, 2) == BatchThen(1, 100 + 8 + 20)

    def test_who_is_late_joins_now(self) -> None:
        late = outlook(ONE, ONE)
        assert self.mean(late, 13, now_s=10) == BatchThen(2, 2 * 130)
        assert self.mean(late, 15, now_s=10).sequences == 1

    def test_who_joins_then_is_there(self) -> None:
        assert self.mean(outlook(replace(ONE, joins_s=5)), 5) == BatchThen(1, 100)
        assert self.mean(outlook(replace(ONE, joins_s=5)), 4.9) == BatchThen(0, 0)

    def test_a_tier_of_which_nothing_is_known_goes_by_its_expected_ends(self) -> None:
        unknown = outlook(replace(ONE, tier="other"))
        assert self.mean(unknown, 8.9) == BatchThen(1, 100 + 89)
        assert self.mean(unknown, 9) == BatchThen(0, 0)

    def test_what_it_has_counts_to_the_most_that_it_may(self) -> None:
        assert self.mean(outlook(replace(ONE, most_tokens=125), grown=100), 2).sequences == 1
        assert self.mean(outlook(replace(ONE, most_tokens=125), grown=100), 3).sequences == 0

    def test_all_choices_go_on(self) -> None:
        assert self.mean(outlook(replace(ONE, choices=3)), 1) == BatchThen(3, 3 * 110)

    def test_contexts_are_as_uncertain_as_their_sequences(self) -> None:
        """Four that are there by half: a standard deviation is one, with a context of 300."""
        found = outlook(ONE, ONE, ONE, ONE).likely(20, 0, 0.1, LIVES)
        assert found.mean == BatchThen(2, 2 * 300)
        assert found.at_most == BatchThen(2 + 3, (2 + 3) * 300)

    def test_tokens_of_strangers_are_not_counted(self) -> None:
        found = outlook(ONE)
        found.grown(key("gone"), 5)
        assert [len(tokens) for _, tokens in found.running()] == [0]


class TestAllAtOnce:
    @pytest.mark.parametrize("lives", [TWO_LIVES, {**TWO_LIVES, "x": LONG_LIFE}, ALL_LONG])
    @pytest.mark.parametrize("seed", range(20))
    def test_is_as_one_by_one(self, seed: int, lives: dict[str, Survival]) -> None:
        """Of three tiers one may be unknown; sequences come, grow and go, and may outlive all."""
        random, sequences = Random(seed), Sequences()
        here: list[RequestKey] = []
        for number in range(300):
            sequences.add(
                key(str(number)),
                tier=random.choice("tux"),
                prompt_tokens=random.randrange(1, 3000),
                most=random.choice((20, 100, 900)),
                choices=random.randrange(1, 4),
                joins_s=random.uniform(0, 9),
                ends_s=random.uniform(0, 20),
            )
            here.append(key(str(number)))
            for grown in random.sample(here, k=min(3, len(here))):
                sequences.grown(grown, random.randrange(1, 900))
            sequences.likely(4.3, 4.0, 0.05, lives)
            if random.random() < 0.4:
                sequences.remove(here.pop(random.randrange(len(here))))
        all_columns = sequences._columns[:, : len(sequences)]
        for then_s in (4.0, 4.5, 7.0, 30.0):
            asked = (then_s, 4.0, 0.05, lives)
            one = sequences._one_by_one(all_columns, *asked)
            other = sequences._all_at_once(all_columns, *asked)
            assert astuple(one) == pytest.approx(astuple(other))
            assert astuple(one) == pytest.approx(astuple(sequences.likely(*asked)))


class TestOverdue:
    """Those that outlive their expected end."""

    def test_they_are_met_by_who_joined_before_now(self) -> None:
        found = outlook(replace(ONE, ends_s=2, tokens=10))
        assert found.met_by(1, 5, 3) == BatchThen(1, 10)

    def test_their_contexts_go_with_them(self) -> None:
        assert outlook(replace(ONE, ends_s=2)).at(99, 3) == BatchThen(0, 0)

    def test_those_that_are_gone_say_nothing_of_how_long_they_last(self) -> None:
        found = outlook(*[replace(ONE, ends_s=2)] * 9)
        found.add(key("long"), replace(ONE, joins_s=-500, ends_s=500))
        before = found.at(4, 3).sequences
        found.remove(key("long"))
        assert before == 10
        assert found.at(4, 3).sequences < 7, "a third of nine has ended in a second and a half"


class TestLengths:
    def test_those_that_run_weigh_as_much_as_the_latest(self) -> None:
        """Of 1,000 that ended with 40 tokens, some 430 count still."""
        lengths = OutputLengths()
        for _ in range(1000):
            lengths.observe("t", 40, was_cut=False)
        for _ in range(2):
            found = lengths.survival("t", [400] * 432)
            assert found is not None
            assert found.goes_on(0, 100) == pytest.approx(0.5, abs=0.01)

    def test_who_was_cut_is_at_risk_no_more(self) -> None:
        """One of four ends at 10, two are cut at 20, the last one ends at 40."""
        lengths = OutputLengths()
        for tokens, was_cut in ((10, False), (20, True), (20, True), (40, False)):
            lengths.observe("t", tokens, was_cut=was_cut)
        found = lengths.survival("t")
        assert found is not None
        assert found.goes_on(0, 30) == pytest.approx(0.75, abs=0.01)
        assert found.goes_on(0, 100) == pytest.approx(0, abs=1e-9)

    def test_very_long_ones_take_no_more_memory(self) -> None:
        lengths = OutputLengths()
        lengths.observe("t", 900_000, was_cut=False)
        found = lengths.survival("t")
        assert found is not None and len(found.shares) * STRIDE < 50_000


class TestForecast:
    """Sequences of 40 or 400 tokens, as many of each: from 40 tokens on half of them are there."""

    @pytest.fixture
    def lifetimes(self) -> Lifetimes:
        class Known(Lifetimes):
            def by_tier(self, outlooks: object, now_s: float) -> dict[str, Survival]:
                return {"t": HALF_ARE_SHORT}

        return Known()

    @pytest.fixture
    def worker(self) -> WorkerView:
        worker = view("d", Role.DECODE, places=99)
        worker.times = PerToken(sequence_s=0.01)
        worker.outlook = outlook(*[ONE] * 10)
        worker.counters = Counters(running=10, decode_sequences=10)
        return worker

    @staticmethod
    def then(lifetimes: Lifetimes, worker: WorkerView, in_s: float) -> DecodePrediction:
        forecast = Forecast(workers_of(worker), lifetimes=lifetimes)
        return forecast.decode(_asked(), worker, in_s, 0)

    def test_steps_take_as_long_as_now(self, lifetimes: Lifetimes, worker: WorkerView) -> None:
        assert self.then(lifetimes, worker, 3.8).batch.sequences == 10, "38 steps"
        worker.counters = Counters(running=10, decode_sequences=5)
        assert self.then(lifetimes, worker, 2.8).step_s == pytest.approx(0.06), "56 steps"

    def test_and_as_with_that_batch_at_last(self, lifetimes: Lifetimes, worker: WorkerView) -> None:
        """Those that start, of which the worker doesn't know: 10 ms at first, and then 50 ms."""
        worker.counters = Counters(running=10, decode_sequences=1)
        assert self.then(lifetimes, worker, 1.0).step_s == pytest.approx(0.11), "33 of 30 ms"
        assert self.then(lifetimes, worker, 1.8).step_s == pytest.approx(0.06), "60 of 30 ms"

    def test_a_pace_is_judged_beside_some_more(
        self, lifetimes: Lifetimes, worker: WorkerView
    ) -> None:
        """But steps, and blocks, are as they will be on average: five of the ten, with contexts of
        367 tokens: after 100 ms a step takes 50."""
        worker.hello = replace(worker.hello, total_blocks=10_000)
        found = self.then(lifetimes, worker, 20)
        assert found.batch.sequences == round(5 + 3 * (10 / 4) ** 0.5)
        assert found.step_s == pytest.approx(0.06)
        assert found.free_blocks == 10_000 - 459 - 5

    @pytest.mark.parametrize("step_s", [0.0, 1e-3])
    def test_without_known_steps_expected_ends_count(
        self, lifetimes: Lifetimes, worker: WorkerView, step_s: float
    ) -> None:
        worker.times = PerToken(sequence_s=step_s)
        worker.outlook = outlook(*[replace(ONE, ends_s=300)] * 10)
        there = self.then(lifetimes, worker, 200).batch.sequences
        assert there == (0 if step_s else 10)

    def test_more_than_were_measured(self, lifetimes: Lifetimes, worker: WorkerView) -> None:
        """Steps of more than five are not known: those of now are taken, or expected ends."""
        worker.times = _UpTo5()
        worker.counters = Counters(running=10, decode_sequences=5)
        assert self.then(lifetimes, worker, 1).batch == BatchThen(10, 10 * 120)
        worker.counters = Counters(running=10, decode_sequences=6)
        assert self.then(lifetimes, worker, 8).batch == BatchThen(10, 10 * 9)

    def test_of_what_others_sent_only_what_is_not_ours(
        self, lifetimes: Lifetimes, worker: WorkerView
    ) -> None:
        worker.counters = Counters(running=12, decode_sequences=10, active_blocks=50)
        alone = replace(worker.counters, running=10, active_blocks=0)
        found = self.then(lifetimes, worker, 1).batch
        worker.counters = alone
        own = self.then(lifetimes, worker, 1).batch
        assert found.sequences - own.sequences == 2
        assert found.kv_tokens - own.kv_tokens == 50 * 4 - 10 * 9


class _UpTo5(PerToken):
    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return 0.05 if sequences <= 5 else float("inf")


def _asked() -> Demand:
    return demand(prompt_tokens=4, output_tokens=4)


class TestUsualPrompts:
    def test_the_first_ones_count_alike_then_the_latest_more(self) -> None:
        usual = UsualPrompts()
        assert usual.longer_by(demand(prompt_tokens=10)) == 0, "nothing is usual yet"
        for tokens in (10, 20):
            usual.saw(tokens)
        assert usual.tokens == 15
        assert usual.longer_by(demand(prompt_tokens=20, n=3)) == 15
        assert usual.longer_by(demand(prompt_tokens=10)) == -5
        for _ in range(300):
            usual.saw(5)
        for _ in range(50):
            usual.saw(105)
        assert usual.tokens == pytest.approx(5 + 100 * (1 - 0.98**50), rel=0.02)
