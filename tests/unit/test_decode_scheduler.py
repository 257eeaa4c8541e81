from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import (
    Emit,
    RunStep,
    Sampled,
    SampleRequest,
    SequenceSlice,
    StepBatch,
    StepDone,
    StepOutcome,
    StepWanted,
)
from kvpool.core.blocks.pool import BlockState
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.transfer.commands import ScatterSlab, SendPeer, SlabScattered
from kvpool.core.transfer.messages import Commit, Committed, SlabFilled, SlabLent
from kvrelay.messages import (
    Abort,
    Generate,
    Lifetime,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    Stop,
    Tokens,
)
from kvrelay.types import FinishReason, PrefixOrigin, RequestSpec, Sampling
from tests.unit.worker_kit import (
    P,
    ahead,
    decode_scheduler,
    done,
    events,
    from_p,
    key,
    names,
    reserve,
    run,
    said,
    spec,
    the_step,
    to_peer,
)


def lend(scheduler: DecodeScheduler, name: str, tokens: int = 3, *, piece: int = 0) -> SlabLent:
    """Of a prompt of so many tokens."""
    announced = ahead(name, tokens, number=piece)
    (lent,) = to_peer(scheduler.handle(from_p(announced), 0))
    assert isinstance(lent, SlabLent)
    return lent


def scatter(scheduler: DecodeScheduler, lent: SlabLent) -> SlabScattered:
    """Fill the slab; the outcome that its scatter will have."""
    filled = SlabFilled(
        key=lent.key, piece=lent.piece, slab_id=lent.slab_id, lease_id=lent.lease_id
    )
    (command,) = scheduler.handle(from_p(filled), 0)
    assert isinstance(command, ScatterSlab)
    return SlabScattered(
        key=lent.key,
        piece=lent.piece,
        slab_id=lent.slab_id,
        lease_id=lent.lease_id,
        bytes=5,
        seconds=0.25,
    )


def arrive(
    scheduler: DecodeScheduler,
    request: RequestSpec,
    *,
    finished: tuple[int, ...] = (),
    displaced: bool = False,
) -> list[str]:
    """Reserve and hand over in one piece; first tokens are 100, 101 ...; what the router hears."""
    name = request.key.request_id
    scheduler.handle(replace(reserve(request), displaced=displaced), 0)
    scheduler.handle(scatter(scheduler, lend(scheduler, name, len(request.prompt_ids))), 0)
    commit = Commit(
        key=request.key,
        pieces=1,
        first_token_ids=tuple(100 + i for i in range(request.sampling.n)),
        finished_choices=finished,
    )
    return names(scheduler.handle(from_p(commit), 0))


def assert_idle(scheduler: DecodeScheduler) -> None:
    scheduler.validate()
    assert scheduler.batch.tables.free_blocks == scheduler.batch.tables.blocks
    assert scheduler.sequences == 0
    assert scheduler.handle(StepWanted(), 9) == []


def test_a_handoff_from_reservation_to_release() -> None:
    scheduler = decode_scheduler()
    request = spec("a", 3, max_tokens=3)
    assert scheduler.handle(reserve(request), 1) == [Emit(events=(Reserved(key=key("a"), at_s=1),))]
    scattered = scatter(scheduler, lend(scheduler, "a"))
    commit = Commit(key=key("a"), pieces=1, first_token_ids=(100,))
    assert scheduler.handle(from_p(commit), 2) == []
    assert scheduler.handle(scattered, 3) == [
        SendPeer(peer=P, message=Committed(key=key("a"))),
        Emit(events=(Lifetime(key=key("a"), at_s=3, name="handoff_committed"),)),
    ]
    sample = SampleRequest(sampling=request.sampling, choice=0, prompt_ids=(), emitted_ids=())
    piece = SequenceSlice(
        key=key("a"),
        choice=0,
        token_ids=(100,),
        start=3,
        tables=((0,),),
        samples=(sample,),
        index=1,
        prompt_tokens=3,
    )
    assert scheduler.handle(StepWanted(), 4) == [
        Emit(events=(Lifetime(key=key("a"), at_s=4, name="decode_joined"),)),
        RunStep(batch=StepBatch(slices=(piece,))),
    ]
    token = Tokens(key=key("a"), at_s=5, choice=0, first_index=1, token_ids=(7,))
    assert done(scheduler, (7,), now_s=5) == [Emit(events=(token,))]
    last = run(scheduler, (8,), now_s=6)
    assert said(last) == [(0, 2, (8,), FinishReason.LENGTH)]
    assert names(last) == ["Tokens", "Released"]
    assert_idle(scheduler)


def test_the_commit_may_follow_the_scatter() -> None:
    scheduler = decode_scheduler()
    assert arrive(scheduler, spec("a", 3)) == ["handoff_committed"]


def test_a_prompt_in_two_pieces_joins_after_both() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(reserve(spec("a", 8)), 0)
    slabs = [lend(scheduler, "a", 8, piece=piece) for piece in (0, 1)]
    outcomes = [scatter(scheduler, slab) for slab in slabs]
    commit = Commit(key=key("a"), pieces=2, first_token_ids=(100,))
    assert scheduler.handle(from_p(commit), 0) == []
    assert scheduler.handle(outcomes[1], 0) == []
    assert names(scheduler.handle(outcomes[0], 0)) == ["handoff_committed"]


def test_prefill_here_emits_the_first_token_too() -> None:
    scheduler = decode_scheduler()
    assert names(scheduler.handle(Generate(spec=spec("a", 10, max_tokens=2)), 0)) == ["Reserved"]
    first = scheduler.handle(StepWanted(), 0)
    assert names(first) == ["prefill_started"]
    assert the_step(first).batch.slices[0].token_ids == tuple(range(8))
    assert names(done(scheduler, ())) == []
    assert said(run(scheduler, (7,))) == [(0, 0, (7,), None)]
    assert said(run(scheduler, (8,))) == [(0, 1, (8,), FinishReason.LENGTH)]
    assert_idle(scheduler)


def test_prefill_chunks_are_mixed_into_the_decode_batch() -> None:
    """Whole ones, whatever is decoded beside them."""
    scheduler = decode_scheduler(chunk=8)
    arrive(scheduler, spec("a", 3))
    scheduler.handle(Generate(spec=spec("b", 12)), 0)
    batch = the_step(scheduler.handle(StepWanted(), 0)).batch
    assert [(s.key.request_id, len(s.token_ids)) for s in batch.slices] == [("a", 1), ("b", 8)]


def test_choices_share_the_prompt_and_copy_what_they_write() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 6, n=3))
    assert scheduler.batch.tables.blocks - scheduler.batch.tables.free_blocks == 2
    step = the_step(scheduler.handle(StepWanted(), 0))
    tables = [piece.tables[0] for piece in step.batch.slices]
    assert [table[0] for table in tables] == [0, 0, 0]
    assert len({table[1] for table in tables}) == 3
    assert step.copies == ((((1, tables[0][1]),),), (((1, tables[1][1]),),))
    assert tables[2][1] == 1  # the last holder needs no copy
    assert [s.token_ids for s in step.batch.slices] == [(100,), (101,), (102,)]
    done(scheduler, (1,), (2,), (3,))
    assert the_step(scheduler.handle(StepWanted(), 0)).copies == ()


def test_a_choice_that_ended_with_its_first_token_is_not_decoded() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 3, n=2), finished=(0,))
    (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert (only.choice, only.token_ids) == (1, (101,))


@pytest.mark.parametrize("since", [0, 1, 3])
def test_choices_that_moved_here_go_on_behind_all_that_they_have_emitted(since: int) -> None:
    """What they had when this worker was asked, and what came with the commit. Only the prompt was
    handed over: the rest is computed here, behind the blocks that they share."""
    scheduler = decode_scheduler()
    emitted = ((4, 5, 6), (8,), (), (9, 9))
    known = tuple(ids[: max(0, len(ids) - since)] for ids in emitted)
    request = replace(spec("a", 8, n=4, max_tokens=5), resumed=known)
    scheduler.handle(reserve(request), 0)
    scheduler.handle(scatter(scheduler, lend(scheduler, "a", 8)), 0)
    commit = Commit(
        key=key("a"),
        pieces=1,
        first_token_ids=(4, 8, 3, 9),
        resumed=tuple(ids[len(had) :] for ids, had in zip(emitted, known, strict=True)),
        finished_choices=(3,),
    )
    scheduler.handle(from_p(commit), 0)
    step = the_step(scheduler.handle(StepWanted(), 1))
    slices = {one.choice: one for one in step.batch.slices}
    assert {choice: one.token_ids for choice, one in slices.items()} == {
        0: (4, 5, 6),
        1: (8,),
        2: (3,),
    }
    assert {one.start for one in slices.values()} == {8}
    assert len({one.tables[0][:2] for one in slices.values()}) == 1, "they share the prompt"
    assert [one.index for one in slices.values()] == [3, 1, 1]
    told = events(done(scheduler, (11,), (12,), (13,)))
    tokens = [e for e in told if isinstance(e, Tokens)]
    assert [(one.choice, one.first_index) for one in tokens] == [(0, 3), (1, 1), (2, 1)]
    scheduler.handle(Abort(key=key("a")), 2)
    assert_idle(scheduler)


def test_all_choices_stopped_before_the_join_release_at_once() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(reserve(spec("a", 3)), 0)
    outcome = scatter(scheduler, lend(scheduler, "a"))
    scheduler.handle(Stop(key=key("a"), choice=0, valid_tokens=1), 0)
    scheduler.handle(outcome, 0)
    commit = Commit(key=key("a"), pieces=1, first_token_ids=(100,))
    assert names(scheduler.handle(from_p(commit), 0)) == ["handoff_committed", "Released"]
    assert_idle(scheduler)


def test_stop_after_the_join() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 3, n=2))
    assert scheduler.handle(Stop(key=key("a"), choice=0, valid_tokens=1), 0) == []
    (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert only.choice == 1
    assert scheduler.handle(Stop(key=key("a"), choice=1, valid_tokens=1), 0) == []  # on the device
    assert names(done(scheduler, (7,), now_s=1)) == ["Released"]
    assert_idle(scheduler)


def test_stop_before_the_choices_part_ends_that_choice_with_the_first_token() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(Generate(spec=spec("a", 3, n=2)), 0)
    scheduler.handle(Stop(key=key("a"), choice=0, valid_tokens=0), 0)
    scheduler.handle(Stop(key=key("a"), choice=7, valid_tokens=0), 0)
    run(scheduler, (5, 6))
    (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert (only.choice, only.token_ids) == (1, (6,))


def test_abort_of_a_reservation_a_running_and_a_waiting_request() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(reserve(spec("r", 3)), 0)
    arrive(scheduler, spec("a", 3))
    scheduler.handle(Generate(spec=spec("w", 3)), 0)
    for name in ("r", "a", "w"):
        commands = scheduler.handle(Abort(key=key(name)), 1)
        assert Released(key=key(name), at_s=1) in events(commands)
        assert scheduler.handle(Abort(key=key(name)), 1) == []
    assert_idle(scheduler)


def test_abort_between_a_step_and_its_outcome() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 3, n=2))
    scheduler.handle(StepWanted(), 0)
    assert scheduler.handle(Abort(key=key("a")), 1) == []
    assert names(done(scheduler, (7,), (8,), now_s=2)) == ["Released"]
    assert_idle(scheduler)


def test_slots_and_blocks_are_refused_with_their_reason() -> None:
    scheduler = decode_scheduler(blocks=4, max_running=2)
    scheduler.handle(reserve(spec("a", 3)), 0)
    assert events(scheduler.handle(reserve(spec("b", 3, n=2)), 0)) == [
        ReserveRefused(key=key("b"), at_s=0, reason="slots_exhausted")
    ]
    assert events(scheduler.handle(reserve(spec("c", 16)), 0)) == [
        ReserveRefused(key=key("c"), at_s=0, reason="kv_exhausted")
    ]
    assert events(scheduler.handle(Generate(spec=spec("d", 16)), 0)) == [
        ReserveRefused(key=key("d"), at_s=0, reason="kv_exhausted")
    ]
    assert scheduler.sequences == 1


def preempting(*, caching: bool = True) -> DecodeScheduler:
    """Two sequences of 3 tokens in 2 blocks: each fills its block with the next token."""
    scheduler = decode_scheduler(blocks=2, caching=caching)
    for name in ("old", "new"):
        arrive(scheduler, spec(name, 3))
    assert [s.key.request_id for s in the_step(scheduler.handle(StepWanted(), 0)).batch.slices] == [
        "old",
        "new",
    ]
    done(scheduler, (11,), (12,))
    return scheduler


def test_the_newest_is_preempted() -> None:
    scheduler = preempting()
    (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert only.key == key("old")
    assert scheduler.batch.running_set.preemptions == 1
    assert [s.key for s in scheduler.batch.running_set.awaiting_prefill] == [key("new")]


def test_nobody_new_is_taken_while_a_preempted_one_waits_for_blocks() -> None:
    scheduler = preempting()
    scheduler.handle(StepWanted(), 0)
    assert events(scheduler.handle(reserve(spec("c", 1)), 0)) == [
        ReserveRefused(key=key("c"), at_s=0, reason="kv_exhausted")
    ]


def test_a_prefix_on_its_way_lets_no_one_past_a_preempted_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest waits for its prefix, and holds its blocks; the one before it has none."""
    fetching = {"fetched"}
    monkeypatch.setattr(
        PrefixLookup, "is_fetching", lambda _, holder: holder.key.request_id in fetching
    )
    scheduler = decode_scheduler(blocks=16, chunk=32, max_running=32, caching=False)

    def step() -> list[str]:
        batch = the_step(scheduler.handle(StepWanted(), 0)).batch
        done(scheduler, *[(7,) if piece.samples else () for piece in batch.slices])
        scheduler.validate()
        return [piece.key.request_id for piece in batch.slices]

    def ask(name: str, tokens: int, most: int) -> bool:
        asked = Generate(spec=spec(name, tokens, max_tokens=most))
        return names(scheduler.handle(asked, 0)) == ["Reserved"]

    for name, tokens, most in (("old", 20, 40), ("preempted", 28, 30), ("fetched", 3, 4)):
        assert ask(name, tokens, most)
        step()
    while key("preempted") not in [s.key for s in scheduler.batch.running_set.awaiting_prefill]:
        step()
    came = 0
    while "preempted" not in step():
        came += ask(f"new-{came}", 7, 9)
    assert came == 0
    fetching.clear()
    while scheduler.has_work:
        step()


def test_a_preempted_sequence_is_recomputed_with_all_it_has_said() -> None:
    scheduler = preempting(caching=False)
    scheduler.handle(StepWanted(), 0)
    scheduler.handle(Abort(key=key("old")), 0)
    done(scheduler, (13,))
    step = scheduler.handle(StepWanted(), 0)
    (only,) = the_step(step).batch.slices
    assert (only.start, only.token_ids) == (0, (0, 1, 2, 100, 12))
    assert only.prompt_tokens == 5
    assert only.index == 2
    assert names(step) == []  # it has joined before
    assert said(done(scheduler, (14,))) == [(0, 2, (14,), None)]
    assert the_step(scheduler.handle(StepWanted(), 0)).batch.slices[0].token_ids == (14,)


def test_a_preempted_sequence_goes_on_from_what_is_still_cached() -> None:
    scheduler = preempting()
    scheduler.handle(StepWanted(), 0)
    scheduler.handle(Abort(key=key("old")), 0)
    done(scheduler, (13,))
    step = scheduler.handle(StepWanted(), 0)
    (only,) = the_step(step).batch.slices
    assert (only.start, only.token_ids) == (4, (12,))
    assert only.index == 2
    assert said(done(scheduler, (14,))) == [(0, 2, (14,), None)]


def test_the_next_turn_finds_prompt_and_answer_on_the_decode_worker() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 7, max_tokens=3))
    run(scheduler, (11,))
    run(scheduler, (12,))  # its KV is not computed any more
    assert_idle(scheduler)
    first = (*range(7), 100, 11)
    longer = RequestSpec(
        key=key("b"), prompt_ids=(*first, 12, 13), sampling=Sampling(max_tokens=1, seed=1)
    )
    (reserved,) = events(scheduler.handle(reserve(longer), 0))
    assert isinstance(reserved, Reserved)
    assert reserved.held_tokens == 8


def test_a_prompt_prefilled_here_runs_only_what_is_new() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(Generate(spec=spec("a", 9, max_tokens=1)), 0)
    run(scheduler, ())
    run(scheduler, (11,))
    assert_idle(scheduler)
    scheduler.handle(Generate(spec=spec("b", 9, max_tokens=1)), 0)
    step = scheduler.handle(StepWanted(), 0)
    (only,) = the_step(step).batch.slices
    assert (only.start, only.token_ids) == (8, (8,))
    (started,) = events(step)
    assert isinstance(started, Lifetime)
    assert (started.name, started.tokens) == ("prefill_started", 8)
    done(scheduler, (11,))
    assert_idle(scheduler)


def test_blocks_from_a_pool_are_named_when_their_request_ends_at_once() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(Generate(spec=spec("a", 9, max_tokens=1)), 0)
    (sequence,) = scheduler.batch.running_set.awaiting_prefill
    restored = Restored(holder=sequence.holder, tokens=8, origin=PrefixOrigin.HOST)
    scheduler.batch.running_set.restored(restored)
    run(scheduler, (11,))
    assert_idle(scheduler)
    assert scheduler.batch.tables.counts()[BlockState.CACHED] == 2


def test_a_preempted_sequence_can_be_aborted() -> None:
    scheduler = preempting()
    scheduler.handle(StepWanted(), 0)
    assert names(scheduler.handle(Abort(key=key("new")), 0)) == ["Released"]
    scheduler.handle(Abort(key=key("old")), 0)
    done(scheduler, (13,))
    assert_idle(scheduler)


def test_penalties_need_the_history() -> None:
    sampling = Sampling(max_tokens=4, seed=1, presence_penalty=0.5)
    request = RequestSpec(key=key("a"), prompt_ids=(1, 2), sampling=sampling)
    scheduler = decode_scheduler()
    arrive(scheduler, request)
    for emitted in ((100,), (100, 7)):
        (sample,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices[0].samples
        assert (sample.prompt_ids, sample.emitted_ids) == ((1, 2), emitted)
        done(scheduler, (7,))


def test_a_grammar_that_can_not_be_followed_ends_its_request_alone() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 3, max_tokens=9, n=2))
    arrive(scheduler, spec("b", 3, max_tokens=9))
    step = the_step(scheduler.handle(StepWanted(), 1))
    assert [piece.key.request_id for piece in step.batch.slices] == ["a", "a", "b"]
    sampled = tuple((Sampled(token_id=t),) for t in (7, 8, 9))
    outcome = StepOutcome(sampled=sampled, failed={0: "too complex", 1: "too complex"})
    heard = scheduler.handle(StepDone(outcome=outcome, seconds=0.1), 2)
    failed = RequestFailed(key=key("a"), at_s=2, reason="grammar", message="too complex")
    assert [one for one in events(heard) if one.key == key("a")] == [
        failed,
        Released(key=key("a"), at_s=2),
    ]
    assert said(heard) == [(0, 1, (9,), None)]
    scheduler.validate()
    scheduler.handle(Abort(key=key("b")), 3)
    assert_idle(scheduler)


def test_a_matched_grammar_ends_a_choice_whatever_was_drawn() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, spec("a", 3, max_tokens=9))
    the_step(scheduler.handle(StepWanted(), 1))
    outcome = StepOutcome(sampled=((Sampled(token_id=7, ends=True),),))
    heard = scheduler.handle(StepDone(outcome=outcome, seconds=0.1), 2)
    assert said(heard) == [(0, 1, (7,), FinishReason.STOP)]
    (told,) = [one for one in events(heard) if isinstance(one, Tokens)]
    assert told.stop_token_id == 7
    assert_idle(scheduler)
