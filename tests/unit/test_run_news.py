"""What a tier tells of its strands."""

from __future__ import annotations

import random

import pytest

from kvpool.core.blocks.news import RunNews
from kvrelay.messages import CutRun, StoredRun
from tests.unit.directory_kit import StrandTree, chain, cut, run

MANY = 1000
A = chain("abcdefgh")
X = chain("abcdxy")


def tree(*sequences: list[bytes]) -> tuple[StrandTree, RunNews]:
    """Each sequence is a strand of its own. All is told."""
    one = StrandTree(random.Random(1))
    for hashes in sequences:
        one.insert(hashes, grows=False)
    news = RunNews(one, one.parts)
    one.news.append(news)
    news.take(MANY)
    return one, news


def test_a_strand_is_told_below_its_parent_and_then_as_it_grows() -> None:
    one, news = tree()
    one.insert(A[:3], grows=False)
    one.insert(A[:5], grows=False)
    assert news.take(MANY) == ((), (run(1, A[:3]), run(2, A[3:5], parent=1, start=3)))
    one.insert(A[:6], grows=True)
    assert news.take(MANY) == ((), (run(2, A[5:6], parent=2, start=5),))
    assert news.take(MANY) == ((), ()) and not news


def test_what_comes_and_goes_in_between_is_not_told() -> None:
    one, news = tree(A[:4])
    one.insert(X, grows=False)
    one.cut(2, 4)
    assert not news
    one.insert(A, grows=True)
    one.cut(1, 4)
    assert news.take(MANY) == ((), ())


def test_a_strand_that_shrinks_and_grows_again_is_cut_and_stored() -> None:
    one, news = tree(A)
    one.cut(1, 6)
    one.cut(1, 4)
    one.insert(X, grows=True)
    assert news.take(MANY) == ((cut(1, 4),), (run(1, X[4:], parent=1, start=4),))
    one.cut(1, 5)
    assert news.take(MANY) == ((cut(1, 5),), ())


def test_the_lowest_end_counts() -> None:
    one, news = tree(A)
    one.cut(1, 4)
    one.insert(X, grows=True)
    one.cut(1, 5)
    assert news.take(MANY) == ((cut(1, 4),), (run(1, X[4:5], parent=1, start=4),))


def test_strands_below_another_one_are_cut_before_it() -> None:
    one, news = tree(A[:4], A, X)
    one.insert(chain("abcdef"), grows=False)  # nothing new
    one.cut(2, 4)
    one.cut(3, 4)
    one.cut(1, 2)
    one.insert(chain("abq"), grows=False)
    cuts, stored = news.take(MANY)
    assert cuts == (cut(3, 4), cut(2, 4), cut(1, 2))
    assert stored == (run(4, chain("abq")[2:], parent=1, start=2),)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_a_greeting_has_pages(most: int) -> None:
    one, _ = tree(A, X, chain("zw"))
    news, pages = RunNews(one, reversed([*one.parts])), list[tuple[StoredRun, ...]]()
    while news:
        cuts, stored = news.take(most)
        assert not cuts
        pages.append(stored)
    sizes = [sum(len(each.hashes) // 32 for each in page) for page in pages]
    assert sum(sizes) == len(A) + 2 + 2 and max(sizes) <= most
    assert all(size == most for size in sizes[:-1])
    first = [each for page in pages for each in page if each.parent != each.number]
    assert first[0].hashes == A[0] or most > 1
    assert [(each.number, each.parent, each.start) for each in first] == [
        (1, 0, 0),
        (2, 1, 4),
        (3, 0, 0),
    ]


def test_cuts_do_not_wait_for_a_page() -> None:
    one, news = tree(A, X)
    one.insert(chain("zyxw"), grows=False)
    assert len(news.take(1)[1]) == 1
    one.cut(2, 5)
    one.cut(1, 7)
    assert news.take(1)[0] == (cut(2, 5), cut(1, 7))


def test_a_strand_that_is_cut_while_it_is_told_is_told_as_it_is() -> None:
    one, news = tree()
    one.insert(A, grows=False)
    assert news.take(3)[1] == (run(1, A[:3]),)
    one.cut(1, 5)
    assert news.take(1) == ((), (run(1, A[3:4], parent=1, start=3),))
    one.cut(1, 2)
    one.insert(chain("abvw"), grows=True)
    expected = run(1, chain("abvw")[2:], parent=1, start=2)
    assert news.take(MANY) == ((cut(1, 2),), (expected,))
    assert not news


def test_it_says_how_many_strands_wait() -> None:
    one, news = tree(A)
    assert news.waiting == 0
    one.insert(X, grows=False)
    one.insert(chain("z"), grows=False)
    assert news.waiting == 2
    one.cut(1, 6)
    assert news.waiting == 3
    one.cut(3, 0)
    assert news.waiting == 2, "nothing is told of what came and went"
    news.take(1)
    assert news.waiting == 1
    news.take(MANY)
    assert news.waiting == 0


@pytest.mark.parametrize("seed", range(30))
def test_a_parent_is_told_before_what_begins_below_it(seed: int) -> None:
    """And what was told is always a part of what there was."""
    draw = random.Random(seed)
    one = StrandTree(draw)
    news = RunNews(one)
    one.news.append(news)
    heard: dict[int, list[bytes]] = {}
    begins: dict[int, int] = {}
    for _ in range(400):
        if draw.random() < 0.6 or not one.parts:
            one.insert(chain(draw.choices("abc", k=draw.randint(1, 10))))
        else:
            one.evict()
        if draw.random() < 0.3:
            _hear(heard, begins, *news.take(draw.randint(1, 9)))
    while news:
        _hear(heard, begins, *news.take(3))
    assert heard == {number: part.hashes for number, part in one.parts.items()}


def _hear(
    heard: dict[int, list[bytes]],
    begins: dict[int, int],
    cuts: tuple[CutRun, ...],
    stored: tuple[StoredRun, ...],
) -> None:
    for one in cuts:
        keep = one.end - begins[one.number]
        assert 0 <= keep < len(heard[one.number]), "nothing is cut in vain"
        del heard[one.number][keep:]
        if not keep:
            del heard[one.number]
    for each in stored:
        if each.parent != each.number:
            assert each.number not in begins, "a number is used once"
            _check_parent(heard, begins, each)
            begins[each.number], heard[each.number] = each.start, []
        assert each.start == begins[each.number] + len(heard[each.number])
        hashes = [each.hashes[at : at + 32] for at in range(0, len(each.hashes), 32)]
        heard[each.number] += hashes


def _check_parent(heard: dict[int, list[bytes]], begins: dict[int, int], new: StoredRun) -> None:
    if not new.parent:
        assert not new.start
        return
    begin = begins[new.parent]
    assert begin < new.start <= begin + len(heard[new.parent]), "the block before it was told"
