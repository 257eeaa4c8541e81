"""Conversations that are kept: by whom, how long, how many, in how much memory."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from router.chat.conversations import KeptBounds, KeptConversations, Turn

ROOM = KeptBounds(answers=100, size_bytes=10_000, age_s=60.0)


def kept(bounds: KeptBounds = ROOM) -> KeptConversations:
    return KeptConversations(bounds)


def add(
    store: KeptConversations,
    answer_id: str,
    *,
    owner: str = "me",
    before: Turn | None = None,
    items: bytes = b"[1]",
    answer: bytes = b"{}",
    now_s: float = 0.0,
) -> Turn | None:
    store.keep(owner, answer_id, before=before, items=items, answer=answer, now_s=now_s)
    store.validate()
    return store.find(owner, answer_id, now_s)


def test_a_conversation_is_all_its_turns_in_order() -> None:
    store = kept()
    one = add(store, "a", items=b"[1]")
    two = add(store, "b", before=one, items=b"[2]")
    fork = add(store, "c", before=one, items=b"[3]")
    assert two is not None
    assert fork is not None
    assert two.conversation() == [b"[1]", b"[2]"]
    assert fork.conversation() == [b"[1]", b"[3]"]
    assert store.size_bytes == 3 * len(b"[1]{}")


def test_an_id_is_known_to_its_owner_alone() -> None:
    store = kept()
    add(store, "a", owner="me")
    assert store.find("you", "a", 0.0) is None
    assert not store.forget("you", "a")
    assert store.forget("me", "a")
    assert not store.forget("me", "a")
    assert (store.answers, store.size_bytes) == (0, 0)


def test_an_answer_expires_and_a_later_turn_keeps_what_it_goes_on_behind() -> None:
    store = kept()
    one = add(store, "a", items=b"[1]", now_s=0.0)
    add(store, "b", before=one, items=b"[2]", now_s=30.0)
    assert store.find("me", "a", 59.9) is one
    assert store.find("me", "a", 60.0) is None
    two = store.find("me", "b", 60.0)
    assert two is not None
    assert two.conversation() == [b"[1]", b"[2]"]
    store.validate()
    assert store.find("me", "b", 90.0) is None
    assert store.size_bytes == 0
    store.validate()


def test_a_turn_that_expired_while_its_answer_was_written_counts_again() -> None:
    store = kept()
    one = add(store, "a", items=b"[1]", now_s=0.0)
    assert store.find("me", "a", 100.0) is None
    assert store.size_bytes == 0
    two = add(store, "b", before=one, items=b"[2]", now_s=100.0)
    assert two is not None
    assert two.conversation() == [b"[1]", b"[2]"]
    assert store.size_bytes == 2 * len(b"[1]{}")


def test_the_oldest_answers_go_first_when_there_are_too_many() -> None:
    store = kept(KeptBounds(answers=2, size_bytes=10_000, age_s=60.0))
    for answer_id in "abc":
        add(store, answer_id)
    assert [store.find("me", i, 0.0) is not None for i in "abc"] == [False, True, True]


def test_who_keeps_most_makes_room() -> None:
    store = kept(KeptBounds(answers=100, size_bytes=1000, age_s=60.0))
    add(store, "mine", owner="me", items=b"x" * 100)
    for number in range(20):
        add(store, f"theirs{number}", owner="they", items=b"x" * 98, now_s=1.0)
    assert store.find("me", "mine", 1.0) is not None
    assert store.find("they", "theirs0", 1.0) is None
    assert store.find("they", "theirs19", 1.0) is not None
    assert store.size_bytes <= 1000


def test_what_is_larger_than_all_memory_is_not_kept() -> None:
    store = kept(KeptBounds(answers=100, size_bytes=1000, age_s=60.0))
    assert add(store, "a", items=b"x" * 1001) is None
    assert store.size_bytes == 0


def test_an_id_that_comes_again_replaces_its_answer() -> None:
    store = kept()
    add(store, "a", items=b"[1]")
    again = add(store, "a", items=b"[22]")
    assert again is not None
    assert again.items == b"[22]"
    assert store.answers == 1


class Kept(RuleBasedStateMachine):
    """Any order of calls keeps the counts right and the bounds."""

    turns: Bundle[tuple[str, Turn]] = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.bounds = KeptBounds(answers=5, size_bytes=60, age_s=10.0)
        self.store = KeptConversations(self.bounds)
        self.now_s = 0.0

    @rule(
        target=turns,
        owner=st.sampled_from("xyz"),
        answer_id=st.sampled_from("abcdef"),
        size=st.integers(0, 70),
    )
    def begins(self, owner: str, answer_id: str, size: int) -> object:
        return self.kept(owner, answer_id, None, size)

    @rule(target=turns, behind=turns, answer_id=st.sampled_from("abcdef"), size=st.integers(0, 20))
    def goes_on(self, behind: tuple[str, Turn], answer_id: str, size: int) -> object:
        owner, before = behind
        return self.kept(owner, answer_id, before, size)

    def kept(self, owner: str, answer_id: str, before: Turn | None, size: int) -> object:
        self.store.keep(
            owner, answer_id, before=before, items=b"x" * size, answer=b"", now_s=self.now_s
        )
        turn = self.store.find(owner, answer_id, self.now_s)
        return multiple() if turn is None else (owner, turn)

    @rule(owner=st.sampled_from("xyz"), answer_id=st.sampled_from("abcdef"))
    def deleted(self, owner: str, answer_id: str) -> None:
        self.store.forget(owner, answer_id)
        assert self.store.find(owner, answer_id, self.now_s) is None

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.find("x", "a", self.now_s)

    @invariant()
    def counts_hold(self) -> None:
        self.store.validate()
        assert self.store.answers <= self.bounds.answers
        assert self.store.size_bytes <= self.bounds.size_bytes


TestAnyOrder = Kept.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
