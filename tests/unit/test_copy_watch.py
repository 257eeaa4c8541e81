"""When a copy has taken too long: only the oldest of a peer is timed."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from kvpool.core.transfer.commands import SlabWritten, WriteSlab
from kvpool.core.transfer.copy_watch import LEAST_S, CopyWatch, PeerCopy, limit_s
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks
from kvpool.core.transfer.write import Side
from kvrelay.types import Incarnation
from tests.unit.test_prefill_scheduler import write_of
from tests.unit.worker_kit import FACTS, D, P


def copy(name: str, peer: Incarnation = D) -> WriteSlab:
    return replace(write_of(name, 3), peer=peer)


def written(one: WriteSlab) -> SlabWritten:
    return SlabWritten(key=one.lent.key, piece=one.lent.piece, bytes=1, seconds=0.1)


def at_once(_: PeerCopy) -> float:
    return 0.0


def late(watch: CopyWatch, now_s: float) -> list[Incarnation]:
    return [drop.peer for drop in watch.overdue(at_once, now_s)]


@pytest.mark.parametrize(("predicted_s", "limit"), [(0, 2), (0.1, 2), (0.3, 3), (5, 50)])
def test_the_limit_is_ten_times_what_is_predicted_and_two_seconds_at_least(
    predicted_s: float, limit: float
) -> None:
    assert limit_s(predicted_s) == pytest.approx(limit)
    watch = CopyWatch()
    watch.begin(copy("a"), 100)
    assert watch.overdue(lambda _: predicted_s, 100 + limit) == []
    (drop,) = watch.overdue(lambda _: predicted_s, 100.1 + limit)
    assert drop.peer == D and f"took over {limit:.1f} s" in drop.reason


@pytest.mark.parametrize("by_itself", [True, False])
def test_copies_over_a_link_that_is_gone_are_timed_no_more(by_itself: bool) -> None:
    """They may last, and none of the next link is late because of them."""
    watch, stuck, behind, later = CopyWatch(), copy("stuck"), copy("behind"), copy("later")
    watch.begin(stuck, 0)
    watch.begin(behind, 0)
    if by_itself:
        watch.lost(D)
    else:
        assert late(watch, 2.5) == [D]
    assert late(watch, 3) == [] and len(watch) == 0
    watch.begin(later, 4)
    watch.end(written(stuck), 5)
    watch.end(written(behind), 5)
    assert late(watch, 6) == []
    assert late(watch, 6.1) == [D], "timed from its own beginning"


def test_what_waits_behind_others_is_not_late() -> None:
    """Twenty copies of a second and a half each."""
    watch, copies = CopyWatch(), [copy(f"r{i}") for i in range(20)]
    for one in copies:
        watch.begin(one, 0)
    for i, one in enumerate(copies, 1):
        assert late(watch, 1.5 * i) == []
        watch.end(written(one), 1.5 * i)
    assert len(watch) == 0


def test_a_pull_is_a_copy_too() -> None:
    watch, write = CopyWatch(), copy("a").write
    side = Side(tables=((0,),), block_size=4)
    pull = PullBlocks(peer=P, pull=7, write=write, kv=FACTS, source=side, tables=((0,),))
    watch.begin(pull, 0)
    assert late(watch, 3) == [P]
    watch.end(BlocksPulled(pull=7, bytes=0, seconds=3, error="gone"), 4)
    watch.end(BlocksPulled(pull=7, bytes=0, seconds=3), 4)
    assert len(watch) == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_agrees_with_a_list_of_copies(seed: int) -> None:
    """The naive model: for each peer its copies in order, and when the first became first."""
    rng = random.Random(seed)
    watch, now_s = CopyWatch(), 0.0
    lines: dict[Incarnation, list[WriteSlab]] = defaultdict(list)
    since_s: dict[Incarnation, float] = {}
    for i in range(300):
        now_s += rng.choice([0.0, 0.3, 1.0])
        peer = rng.choice([P, D, Incarnation("x")])
        if rng.random() < 0.5:
            one = copy(f"r{i}", peer)
            watch.begin(one, now_s)
            since_s[peer] = since_s[peer] if lines[peer] else now_s
            lines[peer].append(one)
        elif lines[peer] and rng.random() < 0.9:
            watch.end(written(lines[peer].pop(0)), now_s)
            since_s[peer] = now_s
        else:
            watch.lost(peer)
            lines[peer] = []
        due = {peer for peer, line in lines.items() if line and now_s - since_s[peer] > LEAST_S}
        assert {*late(watch, now_s)} == due
        lines |= {peer: [] for peer in due}
        watch.validate()
