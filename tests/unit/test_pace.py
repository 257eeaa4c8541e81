"""Who sits on a lent place steps back for the pace of those on their own, and loses nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from decode_worker.packing import LEAST_SHARE
from decode_worker.scheduler import DecodeScheduler
from engine.core.step import StepWanted
from engine.core.step_times import LinearTimes, decode_work
from kvrelay.messages import Generate, Tokens
from kvrelay.types import RequestSpec
from tests.unit.test_decode_scheduler import arrive, assert_idle
from tests.unit.test_decode_shares import TIERS, of, running, scheduler
from tests.unit.worker_kit import decode_scheduler, done, events, key, spec, the_step

PER_SEQUENCE = LinearTimes(decode_knots=((1, 0.010), (2, 0.020), (3, 0.030), (4, 0.040)))


def paced(tier: str, name: str, tpot_s: float | None, **more: int) -> RequestSpec:
    return replace(of(tier, name, **more), tpot_s=tpot_s)


def beside_free(
    tpot_s: float | None, times: LinearTimes | None = PER_SEQUENCE, tier: str = "premium"
) -> DecodeScheduler:
    """Three free ones, and one that wants its pace; what steps take is known once they are here."""
    one = scheduler()
    for i in range(3):
        arrive(one, paced("free", f"f{i}", 1.0, max_tokens=6))
    arrive(one, paced(tier, "p", tpot_s, max_tokens=3))
    one.batch.times = times
    return one


@pytest.mark.parametrize(
    ("tpot_s", "there"),
    [(0.05, 4), (0.035, 3), (0.034, 3), (0.033, 2), (0.012, 1), (0.01, 1), (None, 4)],
)
def test_as_many_go_on_as_its_pace_bears(tpot_s: float | None, there: int) -> None:
    """Nine tenths of it are for steps."""
    assert running(beside_free(tpot_s)) == ["p", "f0", "f1", "f2"][:there]


def test_nobody_steps_back_for_a_pace_that_it_could_not_have_alone() -> None:
    assert running(beside_free(0.0099)) == ["p", "f0", "f1", "f2"]
    context = LinearTimes(decode_knots=((4, 0.0),), decode_kv_token_s=0.001)
    assert running(beside_free(0.0039, times=context)) == ["p", "f0", "f1", "f2"]  # 4 tokens


def test_but_for_the_others_that_can_have_theirs() -> None:
    one = scheduler()
    for name in ("f0", "f1"):
        arrive(one, paced("free", name, None))
    arrive(one, paced("premium", "p", 0.001))
    arrive(one, paced("standard", "s", 0.025))
    one.batch.times = PER_SEQUENCE
    assert running(one) == ["p", "s"]


# --- for how long -------------------------------------------------------------------------------


def stood_back(one: DecodeScheduler, step_s: float = 1.0) -> dict[str, float]:
    """# request |-> as told with its last token, of all, in steps that take so long"""
    told, now_s = {}, 0.0
    while one.has_work:
        batch = the_step(one.handle(StepWanted(), now_s)).batch
        now_s += step_s
        drawn = [(7,) if piece.samples else () for piece in batch.slices]
        for event in events(done(one, *drawn, now_s=now_s)):
            if isinstance(event, Tokens) and event.finish_reason is not None:
                told[event.key.request_id] = event.stood_back_s
            elif isinstance(event, Tokens):
                assert event.stood_back_s == 0
    return told


def test_the_last_token_tells_for_how_long_it_stood_back() -> None:
    """For the two steps that premium needs; one of the three goes on beside it."""
    step_s = 2**-10
    names = ("p", "f0", "f1", "f2")
    for tpot_s, steps in ((0.012, (0, 2, 2, 2)), (0.03, (0, 0, 2, 2)), (None, (0, 0, 0, 0))):
        told = stood_back(beside_free(tpot_s), step_s)
        assert told == {name: n * step_s for name, n in zip(names, steps, strict=True)}


def test_so_does_one_that_was_preempted() -> None:
    """Two sequences of three tokens in two blocks of four. The other one yields four tokens more
    until it is done, of which the first beside it."""
    one = decode_scheduler(blocks=2)
    for name in ("old", "new"):
        arrive(one, spec(name, 3, max_tokens=6))
    told = stood_back(one)
    assert one.batch.running_set.preemptions > 0
    assert told["old"] == 0
    assert told["new"] == 4


def test_until_it_has_all_computed_again() -> None:
    """Its five tokens in chunks of two: of these the first two steps count too."""
    one = decode_scheduler(blocks=2, chunk=2, caching=False)
    for name in ("old", "new"):
        arrive(one, spec(name, 3, max_tokens=6))
    assert stood_back(one) == {"old": 0, "new": 4 + 2}


def test_who_lost_its_place_tells_too() -> None:
    one = scheduler()
    for i in range(4):
        arrive(one, paced("free", f"f{i}", None, max_tokens=4))
    arrive(one, paced("premium", "p", None, max_tokens=3))
    told = stood_back(one)
    assert {name for name, seconds in told.items() if seconds} == {"f3"}
    assert told["f3"] == 2


def test_who_steps_back_keeps_its_blocks_and_goes_on_later() -> None:
    one = beside_free(0.012)
    blocks = one.batch.tables.free_blocks
    assert running(one) == ["p"]
    assert one.batch.tables.free_blocks == blocks
    assert one.batch.running_set.preemptions == 0
    assert running(one) == ["p"]  # its last
    assert running(one) == ["f0", "f1", "f2"]
    while one.has_work:
        running(one)
    assert_idle(one)
    assert one.generated_tokens == 3 * 5 + 2


def tokens_beside_premium(times: LinearTimes, tpot_s: float, until_s: float) -> dict[str, int]:
    """# request |-> tokens, of three free ones, where premium's place is never empty."""
    one = decode_scheduler(blocks=4000, slabs=4, max_running=4, qos=TIERS)
    for i in range(3):
        arrive(one, paced("free", f"f{i}", None, max_tokens=10_000))
    arrive(one, paced("premium", "p", tpot_s, max_tokens=10_000))
    one.batch.times = times
    tokens, now_s = Counter(p=0, f0=0, f1=0, f2=0), 0.0
    while now_s < until_s:
        batch = the_step(one.handle(StepWanted(), now_s)).batch
        tokens.update(piece.key.request_id for piece in batch.slices)
        lengths = sum(piece.start + 1 for piece in batch.slices)
        now_s += times.step_s(decode_work(len(batch.slices), lengths))
        done(one, *[(7,)] * len(batch.slices), now_s=now_s)
        one.validate()
    return tokens


@pytest.mark.parametrize("tpot_s", [0.011, 0.012, 0.0235, 0.03, 0.5])
def test_who_steps_back_keeps_a_twentieth_of_the_pace_that_it_had_alone(tpot_s: float) -> None:
    until_s = 6.0
    tokens = tokens_beside_premium(PER_SEQUENCE, tpot_s, until_s)
    alone = until_s / 0.010
    assert min(tokens.values()) >= LEAST_SHARE * alone - 1, "the last is still to come"
    assert tokens["p"] == max(tokens.values())
    if tpot_s < 0.02:
        assert max(tokens[f"f{i}"] for i in range(3)) <= 1.1 * LEAST_SHARE * alone


def test_so_does_one_whose_context_grows() -> None:
    """Its pace alone slows down with it."""
    times = LinearTimes(decode_knots=((4, 0.001),), decode_kv_token_s=1e-5)
    tokens = tokens_beside_premium(times, 0.05, 8.0)
    count, alone_s = 0, 0.0
    while alone_s < 8.0:
        alone_s += times.step_s(decode_work(1, 4 + count))
        count += 1
    assert min(tokens.values()) >= LEAST_SHARE * count - 1


def test_a_prompt_that_is_held_back_goes_on_slowly() -> None:
    """17 ms leave no room for 16 tokens beside a step of 10 ms. These take 26 ms alone."""
    one, took, now_s = with_a_prompt(0.017, 256, blocks=120), 0, 0.0
    while now_s < 0.5:
        batch = the_step(one.handle(StepWanted(), now_s)).batch
        chunk = sum(len(s.token_ids) for s in batch.slices if s.key.request_id == "long")
        assert chunk in (0, 16)
        took += chunk
        now_s += 0.010 + 0.001 * chunk
        done(one, *[((7,) if s.samples else ()) for s in batch.slices], now_s=now_s)
        one.validate()
    assert 16 <= took <= 32


@pytest.mark.parametrize("times", [None, LinearTimes(decode_knots=((1, 9.0),))])
def test_nobody_steps_back_where_nothing_is_known(times: LinearTimes | None) -> None:
    assert running(beside_free(0.012, times=times)) == ["p", "f0", "f1", "f2"]


def test_nobody_steps_back_for_one_on_a_lent_place() -> None:
    assert running(beside_free(0.012, tier="free")) == ["f0", "f1", "f2", "p"]


def test_context_counts_too() -> None:
    times = LinearTimes(decode_knots=((4, 0.0),), decode_kv_token_s=0.001)
    assert running(beside_free(0.0089, times=times)) == ["p", "f0"]  # 4 tokens each


def test_what_is_computed_again_comes_in_smaller_chunks() -> None:
    """Of a prompt of 64 that is prefilled beside premium, so that the step stays in its pace."""
    times = LinearTimes(decode_knots=((4, 0.010),), prefill_token_s=0.001)
    for tpot_s, chunk in ((0.2, 64), (0.05, 32), (0.03, 16), (0.02, 0)):
        one = decode_scheduler(blocks=60, slabs=4, chunk=64, qos=TIERS, times=times)
        arrive(one, paced("premium", "p", tpot_s))
        one.handle(Generate(spec=paced("free", "long", None, tokens=64)), 0)
        batch = the_step(one.handle(StepWanted(), 0)).batch
        taken = {piece.key: len(piece.token_ids) for piece in batch.slices}
        assert taken.pop(key("p")) == 1
        assert taken == ({key("long"): chunk} if chunk else {})


def test_the_strictest_pace_counts() -> None:
    one = scheduler()
    for name in ("f0", "f1"):
        arrive(one, paced("free", name, None))
    arrive(one, paced("premium", "p", 0.05))
    arrive(one, paced("standard", "s", 0.025))
    one.batch.times = PER_SEQUENCE
    assert running(one) == ["p", "s"]


def test_chunks_share_the_pace_with_those_that_decode_and_with_each_other() -> None:
    """10 ms for each that decodes and 1 ms for each token of a prompt, of 45 ms."""
    knots = ((1, 0.010), (2, 0.020), (4, 0.040))
    times = LinearTimes(decode_knots=knots, prefill_token_s=0.001)
    for others, chunks in ((["f0"], [16]), ([], [32])):
        one = decode_scheduler(blocks=80, slabs=4, chunk=64, qos=TIERS)
        for name in others:
            arrive(one, paced("free", name, None))
        arrive(one, paced("premium", "p", 0.05))
        one.batch.times = times
        for i in range(2):
            request = replace(
                paced("free", f"long{i}", None, tokens=64), prompt_ids=(i, *range(63))
            )
            one.handle(Generate(spec=request), 0)
        batch = the_step(one.handle(StepWanted(), 0)).batch
        assert [len(s.token_ids) for s in batch.slices if len(s.token_ids) > 1] == chunks


def test_premium_s_own_prompt_is_not_held_up() -> None:
    times = LinearTimes(decode_knots=((4, 0.010),), prefill_token_s=0.001)
    one = decode_scheduler(blocks=60, slabs=4, chunk=64, qos=TIERS, times=times)
    arrive(one, paced("standard", "s", 0.02))
    one.handle(Generate(spec=paced("premium", "long", None, tokens=64)), 0)
    assert len(the_step(one.handle(StepWanted(), 0)).batch.slices) == 2


def test_without_tiers_nobody_steps_back() -> None:
    one = decode_scheduler(max_running=4)
    for i in range(4):
        arrive(one, replace(spec(f"r{i}", 3), tpot_s=0.012))
    one.batch.times = PER_SEQUENCE
    assert len(running(one)) == 4


def test_what_is_not_covered_is_not_reached_over_what_breaks_the_pace() -> None:
    """Two together break it; of three nothing is known."""
    one = beside_free(0.012, times=LinearTimes(decode_knots=((1, 0.010), (2, 0.020))))
    assert running(one) == ["p"]


def with_a_prompt(tpot_s: float, tokens: int, *, blocks: int) -> DecodeScheduler:
    """Premium's decoding, 10 ms a step, beside a free prompt of 1 ms a token."""
    times = LinearTimes(decode_knots=((4, 0.010),), prefill_token_s=0.001)
    one = decode_scheduler(blocks=blocks, slabs=4, chunk=64, qos=TIERS, times=times)
    arrive(one, paced("premium", "p", tpot_s, max_tokens=60))
    prompt = paced("free", "long", None, tokens=tokens, max_tokens=20)
    ids = tuple(range(500, 500 + tokens))  # nothing is shared
    one.handle(Generate(spec=replace(prompt, prompt_ids=ids)), 0)
    return one


def test_small_rests_of_a_prompt_go_on_too() -> None:
    """17 tokens fit: of 64 it takes 16, and of what is left as many again."""
    one, took = with_a_prompt(0.03, 64, blocks=60), 0
    for _ in range(8):
        batch = the_step(one.handle(StepWanted(), 0)).batch
        took += sum(len(s.token_ids) for s in batch.slices if s.key.request_id == "long")
        done(one, *[((7,) if s.samples else ()) for s in batch.slices])
    assert took >= 64


def test_a_prompt_that_is_held_back_gives_its_blocks_to_whom_it_waits_for() -> None:
    one = with_a_prompt(0.012, 40, blocks=16)
    premium = 0
    while one.batch.running_set.of(key("p")):
        batch = the_step(one.handle(StepWanted(), 0)).batch
        first = batch.slices[0]
        assert (first.key, len(first.token_ids)) == (key("p"), 1)  # never preempted
        premium += 1
        done(one, *[((7,) if s.samples else ()) for s in batch.slices])
    assert premium == 59
