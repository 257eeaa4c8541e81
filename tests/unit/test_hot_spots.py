"""Who leaves a decode worker that will overflow, and where to."""

from __future__ import annotations

from kvrelay.types import Role
from router.core.load.decode_outlook import Expected
from router.core.migration import FEWEST_LEFT_TOKENS, Decoding, WorkerLoad, fullest, suggest
from router.core.state.worker_view import WorkerView
from tests.unit.router_kit import PerToken, key, view

BLOCKS, BLOCK = 16, 4  # of router_kit's workers


def one(name: str, tokens: int, left: int = 40, *, may_move: bool = True) -> Decoding:
    return Decoding(request_id=name, tokens=tokens, left_tokens=left, may_move=may_move)


def load(name: str, *sequences: Decoding, others: int = 0) -> WorkerLoad:
    return WorkerLoad(worker=view(name, Role.DECODE), sequences=sequences, other_blocks=others)


def names(moves: list[tuple[Decoding, WorkerView]]) -> list[tuple[str, str]]:
    return [(sequence.request_id, worker.incarnation) for sequence, worker in moves]


def test_the_fullest_moment_is_when_one_of_them_ends() -> None:
    assert fullest([]) == (0, 0)
    assert fullest([one("a", 10, 5)]) == (15, 1)
    assert fullest([one("a", 10, 5), one("b", 2, 40)]) == (42, 1)  # a is long over
    assert fullest([one("a", 30, 5), one("b", 2, 20)]) == (42, 2)


def test_the_longest_goes_while_the_memory_will_not_do() -> None:
    """64 tokens' blocks are there."""
    hot = load("d", one("short", 12), one("long", 20))
    assert names(suggest(hot, [load("d2")], 2)) == [("short", "d2")]  # the other fills d2 too
    hot = load("d", one("short", 10, 32), one("long", 14, 33))
    assert names(suggest(hot, [load("d2")], 2)) == [("long", "d2")]
    assert names(suggest(hot, [], 2)) == []
    assert names(suggest(hot, [load("d2")], 0)) == []


def test_nothing_moves_between_the_marks() -> None:
    """At 15 of 16 blocks it is above its low mark, but won't overflow."""
    assert suggest(load("d", one("a", 18, 38)), [load("d2")], 2) == []


def test_what_ends_soon_or_may_not_move_stays() -> None:
    soon = one("soon", 30, FEWEST_LEFT_TOKENS - 1)
    fixed = one("fixed", 20, may_move=False)
    hot = load("d", soon, fixed, one("free", 5))
    assert names(suggest(hot, [load("d2")], 3)) == [("free", "d2")]


def test_the_roomiest_takes_it_and_counts_it_for_the_next() -> None:
    hot = load("d", one("a", 6, 32), one("b", 5, 32), one("c", 4, 32), one("e", 3, 32))
    targets = [load("d2", others=4), load("d3", others=2)]
    assert names(suggest(hot, targets, 3)) == [("a", "d3"), ("b", "d2")]
    assert names(suggest(hot, [load("d2", others=8)], 3)) == []


def test_a_broken_objective_moves_too() -> None:
    hot = load("d", one("a", 5, 32))
    hot.worker.times = PerToken(sequence_s=0.02)
    expected = Expected(joins_s=0, ends_s=1, tokens=1, tpot_s=0.015)
    hot.worker.outlook.add(key(), expected)
    assert names(suggest(hot, [load("d2")], 2)) == [("a", "d2")]
    hot.worker.times = PerToken(sequence_s=0.005)
    assert suggest(hot, [load("d2")], 2) == []
