"""Handoff mode pull: the decode worker takes blocks when the prompt is computed and it has room."""

from __future__ import annotations

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import StepWanted, Tick
from kvpool.core.transfer.commands import ScatterSlab, SlabScattered
from kvpool.core.transfer.messages import (
    Commit,
    HandoffMode,
    PiecesAhead,
    SlabFilled,
    SlabLent,
    TransferCancelled,
)
from kvpool.core.transfer.write import TokenSpan
from kvrelay.messages import Abort, Generate, Reserved
from tests.unit.worker_kit import (
    BLOCK,
    TTL_S,
    ahead,
    decode_scheduler,
    done,
    events,
    from_d,
    from_p,
    key,
    names,
    prefill_of,
    prefill_scheduler,
    reserve,
    run,
    spec,
    to_peer,
)


def puller(*reserved: str, blocks: int = 3, tokens: int = 7) -> DecodeScheduler:
    """Each prompt and its first token take two blocks."""
    scheduler = decode_scheduler(blocks=blocks, chunk=32, caching=False, mode=HandoffMode.PULL)
    for name in reserved:
        (answer,) = events(scheduler.handle(reserve(spec(name, tokens)), 0))
        assert answer == Reserved(key=key(name), at_s=0, held_tokens=0)
    return scheduler


def lent(scheduler: DecodeScheduler, name: str) -> list[SlabLent]:
    answers = to_peer(scheduler.handle(from_p(ahead(name, 7)), 0))
    assert all(isinstance(answer, SlabLent) for answer in answers)
    return answers  # type: ignore[return-value]


def scatter(scheduler: DecodeScheduler, slab: SlabLent) -> SlabScattered:
    place = {"key": slab.key, "piece": slab.piece, "slab_id": slab.slab_id}
    filled = SlabFilled(**place, lease_id=slab.lease_id)  # type: ignore[arg-type]
    (command,) = scheduler.handle(from_p(filled), 0)
    assert isinstance(command, ScatterSlab)
    return SlabScattered(**place, lease_id=slab.lease_id, bytes=5, seconds=0)  # type: ignore[arg-type]


def free(scheduler: DecodeScheduler) -> int:
    return scheduler.batch.tables.free_blocks


def test_more_prompts_are_accepted_than_there_are_blocks_for() -> None:
    scheduler = puller("a", "b", "c")
    assert free(scheduler) == 3
    assert len(lent(scheduler, "a")) == 1
    assert free(scheduler) == 1
    assert lent(scheduler, "b") == lent(scheduler, "c") == []
    assert free(scheduler) == 1


def test_one_that_could_never_fit_is_refused() -> None:
    scheduler = puller()
    assert names(scheduler.handle(reserve(spec("a", 3 * BLOCK)), 0)) == ["ReserveRefused"]
    assert names(scheduler.handle(reserve(spec("b", 3 * BLOCK - 1)), 0)) == ["Reserved"]


def test_blocks_go_to_those_that_wait_in_order_as_they_come_free() -> None:
    scheduler = puller("a", "b", "c")
    (slab,) = lent(scheduler, "a")
    lent(scheduler, "b")
    lent(scheduler, "c")
    scheduler.handle(scatter(scheduler, slab), 0)
    commit = Commit(key=key("a"), pieces=1, first_token_ids=(100,), finished_choices=(0,))
    (_, granted) = to_peer(scheduler.handle(from_p(commit), 0))
    assert isinstance(granted, SlabLent)
    assert granted.key == key("b")
    assert free(scheduler) == 1


def test_who_waits_comes_before_new_prompts_of_its_own() -> None:
    scheduler = puller("a", "b")
    lent(scheduler, "a")
    generate = Generate(spec=spec("x", 1))
    lent(scheduler, "b")
    assert names(scheduler.handle(generate, 0)) == ["ReserveRefused"]
    scheduler.handle(Abort(key=key("b")), 0)
    assert names(scheduler.handle(generate, 0)) == ["Reserved"]


def test_one_that_is_preempted_comes_before_those_that_wait() -> None:
    scheduler = puller("a", tokens=3, blocks=4)
    scheduler.handle(Generate(spec=spec("x", 7)), 0)
    scheduler.handle(Generate(spec=spec("y", 7)), 0)
    run(scheduler, (9,), (9,))
    run(scheduler, (9,), (9,))
    scheduler.handle(StepWanted(), 0)  # y makes room for x
    assert scheduler.batch.running_set.lacks_blocks
    assert free(scheduler) > 0
    assert to_peer(scheduler.handle(from_p(ahead("a", 3)), 0)) == []
    assert scheduler.reservations.awaiting_blocks


@pytest.mark.parametrize("end", ["abort", "fence", "lease"])
def test_one_that_waits_for_blocks_may_end(end: str) -> None:
    scheduler = puller("a", "b")
    lent(scheduler, "a")
    lent(scheduler, "b")
    match end:
        case "abort":
            assert names(scheduler.handle(Abort(key=key("b")), 1)) == ["Released"]
        case "fence":
            fence = from_p(TransferCancelled(key=key("b"), reason="x"))
            assert names(scheduler.handle(fence, 1)) == ["Released"]
        case "lease":
            heard = names(scheduler.handle(Tick(), TTL_S))
            assert heard.count("RequestFailed") == 2
    assert not scheduler.reservations.awaiting_blocks
    scheduler.validate()


def test_a_commit_that_needs_no_piece_waits_for_blocks_too() -> None:
    scheduler = puller("a", "b")
    (slab,) = lent(scheduler, "a")
    commit = Commit(key=key("b"), pieces=0, first_token_ids=(100,))
    assert scheduler.handle(from_p(commit), 0) == []
    outcome = scatter(scheduler, slab)
    scheduler.handle(Abort(key=key("a")), 0)
    assert names(scheduler.handle(outcome, 0)) == ["handoff_committed", "Released"]


def test_the_prefill_worker_announces_each_chunk_before_it_is_computed() -> None:
    scheduler = prefill_scheduler(chunk=8, mode=HandoffMode.PULL)
    scheduler.handle(prefill_of(spec("a", 12)), 0)
    for span in (range(8), range(8, 12)):
        announced = to_peer(scheduler.handle(StepWanted(), 0))
        assert all(isinstance(message, PiecesAhead) for message in announced)
        spans = {m.piece.span for m in announced if isinstance(m, PiecesAhead)}
        assert spans == {TokenSpan(start=span.start, tokens=len(span), next_position=12)}
        assert to_peer(done(scheduler, ())) == []
        slab = SlabLent(key=key("a"), piece=0, slab_id=0, region="r", lease_id=1)  # type: ignore[arg-type]
        assert len(scheduler.handle(from_d(slab), 0)) == (span.start == 0)
