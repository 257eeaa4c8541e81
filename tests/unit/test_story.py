"""What a router remembers of its requests: which moments, in which order, and how many."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from kvrelay.types import FinishReason, Incarnation, Role
from router.core.core import RouterCore
from router.core.events import Aborted, ChoiceStopped, DeadlinePassed, WorkerJoined, WorkerLost
from router.core.state.story import (
    MOST_EVENTS,
    MOST_REASON,
    MOST_REFUSED,
    MOST_SERVED,
    Moment,
    Story,
    StoryRing,
    client_id,
)
from router.core.state.waiting import ASK_AGAIN_S, FAILOVER_PATIENCE_S
from router.live.status import story_told
from tests.unit.router_kit import (
    core_with,
    hello,
    lifetime,
    refused,
    released,
    reserved,
    says,
    split,
    submit,
    tokens,
)
from tests.unit.test_moving import decoding, moving
from tests.unit.test_router_core import running
from tests.unit.test_shared_queue import asked, shared, take

D = Incarnation("d")
LENGTH = FinishReason.LENGTH
LINES = dict[str, tuple[str, ...]]


def lines(core: RouterCore, request_id: str = "r") -> list[str]:
    """Of its only story: moment, workers and reason of each event."""
    (story,) = core.state.stories_of(request_id)
    return [
        " ".join(filter(None, (event.moment, "->".join(event.workers), event.reason)))
        for event in story.events
    ]


SUBMITTED = "submitted 3 prompt tokens, at most 8 more"
FIRST_ATTEMPT = [
    SUBMITTED,
    "asked p->d",
    "reserved d",
    "sent to prefill p->d",
    "first token p",
    "handed over d",
]


# --- the core's stories ---------------------------------------------------------------------------


def test_a_request_that_is_served() -> None:
    core = split()
    submit(core)
    says(core, "d", replace(reserved(), held_tokens=2))
    says(core, "p", replace(lifetime("prefill_started"), tokens=2, source="host"), tokens(0, 10))
    says(core, "d", lifetime("handoff_committed"), lifetime("decode_joined"))
    says(core, "d", replace(tokens(1, 11, reason=LENGTH), stood_back_s=0.25))
    assert lines(core) == [
        SUBMITTED,
        "asked p->d",
        "reserved d 2 tokens are there already",
        "sent to prefill p->d",
        "prefill started p 2 tokens found (host)",
        "first token p",
        "handed over d",
        "decodes d",
        "done d 2 tokens, preempted for 0.250 s",
    ]


def test_a_request_whose_decode_worker_is_lost_shows_both_attempts() -> None:
    core = running(core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE))
    says(core, "d", tokens(1, 11, 12))
    core.handle(WorkerLost(incarnation=D), 3)
    says(core, "d2", reserved(attempt=1))
    says(core, "p", tokens(3, 13, attempt=1))
    says(core, "d2", lifetime("handoff_committed", attempt=1))
    says(core, "d2", tokens(4, 14, attempt=1, reason=LENGTH))
    assert lines(core) == [
        *FIRST_ATTEMPT,
        "tried again p->d worker lost: worker d was lost; 3 tokens so far",
        "asked p->d2",
        "reserved d2",
        "sent to prefill p->d2",
        "first token p",
        "handed over d2",
        "done d2 5 tokens",
    ]


def test_each_choice_has_its_end() -> None:
    core = running(split(), n=2)
    core.handle(ChoiceStopped(request_id="r", choice=1, valid_tokens=1), 3)
    says(core, "d", tokens(1, 11, reason=LENGTH))
    story = lines(core)
    assert story[0] == f"{SUBMITTED} for each of 2 choices"
    assert story[-3:] == [
        "choice done choice 1: stop string",
        "choice done d choice 0: length",
        "done d 3 tokens",
    ]
    (told,) = core.state.stories_of("r")
    (first,) = (event for event in told.events if event.moment is Moment.FIRST_TOKEN)
    assert first.times == 2


def test_the_last_stop_string_ends_it() -> None:
    core = running(split())
    core.handle(ChoiceStopped(request_id="r", choice=0, valid_tokens=1), 3)
    assert lines(core) == [*FIRST_ATTEMPT, "done d 1 tokens"]


def test_a_worker_that_turns_it_down() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    submit(core)
    says(core, "d", refused("kv_exhausted"))
    says(core, "d2", refused("slots_exhausted"))
    assert lines(core) == [
        SUBMITTED,
        "asked p->d",
        "turned down d kv exhausted",
        "asked p->d2",
        "turned down d2 slots exhausted",
        "refused slots exhausted: all places of every decode worker are taken",
    ]


def test_a_request_that_waits_in_vain_says_so_once() -> None:
    core = running(split())
    says(core, "p", draining=True)
    core.handle(WorkerLost(incarnation=D), 3)
    for turn in range(1, 5):
        says(core, "p", now_s=3 + turn * ASK_AGAIN_S)
    says(core, "p", now_s=3 + FAILOVER_PATIENCE_S + 0.2)
    assert lines(core) == [
        *FIRST_ATTEMPT,
        "tried again p->d worker lost: worker d was lost; 1 tokens so far",
        "waits worker lost: worker d was lost",
        "failed p->d worker lost: can't go on: worker d was lost",
    ]
    (story,) = core.state.stories_of("r")
    waits = story.events[-2]
    assert (waits.at_s, waits.times, waits.last_s) == (3, 5, 4)


def test_a_move() -> None:
    core = moving(decoding())
    says(core, "d2", reserved(attempt=1))
    assert lines(core)[-1] == "moved d->d2 its worker would overflow"


def test_a_prompt_that_waits_at_the_router() -> None:
    core = shared("p")
    take(core, asked("a"), asked("b"))
    assert lines(core, "a")[-2:] == ["queued 1 at the router", "sent to prefill p->d"]
    assert lines(core, "b")[-1] == "queued 1 at the router"


def test_a_prefill_worker_that_drains() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE)
    submit(core)
    says(core, "d", reserved())
    core.handle(WorkerJoined(hello=hello("p2", Role.PREFILL)), 2)
    says(core, "p", refused("draining"))
    assert lines(core)[-2:] == ["tried again p->d the worker is draining", "asked p2->d"]


@pytest.mark.parametrize(
    ("event", "last"),
    [
        (Aborted(request_id="r"), "aborted p->d by its client"),
        (DeadlinePassed(request_id="r"), "failed p->d its deadline of 0.000 s has passed"),
    ],
)
def test_an_early_end(event: Aborted | DeadlinePassed, last: str) -> None:
    core = running(split())
    core.handle(event, 3)
    assert lines(core) == [*FIRST_ATTEMPT, last]


def test_of_an_id_that_comes_again_the_latest_is_told() -> None:
    core = split()
    for attempt in (0, 1):
        submit(core, now_s=10 * attempt)
        says(core, "d", reserved(attempt=attempt))
        says(core, "p", tokens(0, 10, attempt=attempt, reason=LENGTH))
        says(core, "d", released(attempt=attempt))
    assert [story.submitted_s for story in core.state.stories_of("r")] == [10]
    assert len(core.state.stories) == 1
    submit(core, now_s=20)
    assert [story.submitted_s for story in core.state.stories_of("r")] == [20]


# --- the bounds -----------------------------------------------------------------------------------


def ended(name: str, last: Moment = Moment.DONE, submitted_s: float = 0.0) -> Story:
    story = Story(name, submitted_s)
    story.note(last, submitted_s)
    return story


def known(ring: StoryRing, *names: str) -> set[str]:
    return {name for name in names if ring.find(name, ())}


def test_the_one_that_ended_first_makes_room() -> None:
    ring = StoryRing(most_served=2, most_refused=1)
    for name in ("a", "b", "a", "c"):
        ring.keep(ended(name))
    assert known(ring, "a", "b", "c") == {"a", "c"}


def test_refusals_do_not_push_served_requests_out() -> None:
    ring = StoryRing(most_served=2, most_refused=1)
    for name in ("a", "b"):
        ring.keep(ended(name))
    for name in ("x", "y"):
        ring.keep(ended(name, Moment.REFUSED))
    assert known(ring, "a", "b", "x", "y") == {"a", "b", "y"}
    assert len(ring) == 3


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    story = Story("r", 0.0)
    for number in range(100):
        story.note(Moment.ASKED, number, (), str(number))
    kept = [int(event.reason) for event in story.events]
    assert kept == [*range(MOST_EVENTS // 2), *range(100 - MOST_EVENTS // 2, 100)]
    assert story.left_out == 100 - MOST_EVENTS


def test_a_long_reason_is_cut() -> None:
    story = Story("r", 0.0)
    story.note(Moment.FAILED, 1.0, (), "x" * 10_000)
    assert len(story.events[0].reason) == MOST_REASON


def full(name: str, events: int, reason: int) -> Story:
    story = Story(name, 0.0)
    for number in range(events):
        cause = f"{number:{reason}d}" if reason else ""
        story.note(list(Moment)[number % len(Moment)], number * 1.1, ("p-0", "d-0"), cause)
    return story


@pytest.mark.parametrize(
    ("events", "reason", "most_bytes"), [(10, 20, 3_000), (MOST_EVENTS, MOST_REASON, 12_400)]
)
def test_what_a_story_takes(events: int, reason: int, most_bytes: int) -> None:
    full("warm", events, reason)
    tracemalloc.start()
    stories = [full(f"cmpl-{number:032d}-12345678", events, reason) for number in range(50)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(stories) < most_bytes
    assert (MOST_SERVED + MOST_REFUSED) * most_bytes < 64 * 10**6


# --- by which id ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked_for", "request_id", "is_meant"),
    [
        ("my-trace", "cmpl-my-trace-1a2b3c4d", True),
        ("my-trace", "chatcmpl-my-trace-1a2b3c4d", True),
        ("my-trace", "cmpl-my-trace-1a2b3c4d-3", True),
        ("cmpl-my-trace-1a2b3c4d", "cmpl-my-trace-1a2b3c4d-3", True),
        ("my", "cmpl-my-trace-1a2b3c4d", False),
        ("my-trace", "cmpl-my-trace-2-1a2b3c4d", False),
        ("trace", "cmpl-my-trace-1a2b3c4d", False),
        ("my.trace", "cmpl-my-trace-1a2b3c4d", False),
        ("job", "job-1", False),
        ("cmpl-my-trace-1a2b3c4d", "cmpl-my-trace-1a2b3c4d-x", False),
        ("a" * 300, f"cmpl-{'a' * 200}-1a2b3c4d", True),
    ],
)
def test_ids_as_clients_know_them(asked_for: str, request_id: str, is_meant: bool) -> None:
    assert bool(client_id(asked_for).fullmatch(request_id)) is is_meant


def test_all_requests_of_one_client_id_are_told_in_their_order() -> None:
    ring = StoryRing()
    first, second = "chatcmpl-t-00000001", "cmpl-t-00000000"
    ring.keep(ended(second, Moment.REFUSED, submitted_s=2.0))
    running_one = ended(first, submitted_s=1.0)
    found = ring.find("t", [running_one])
    assert [story.request_id for story in found] == [first, second]
    assert ring.find(first, [running_one]) == [running_one]


def test_an_id_that_two_tenants_use_tells_both() -> None:
    """Inside the cluster the digits of its tenant stand before it."""
    ring = StoryRing()
    stories = [
        ended(f"{tenant}/mine", submitted_s=at_s)
        for tenant, at_s in (("5f0c1a2b", 2), ("00112233", 1))
    ]
    over_http = ended("5f0c1a2b/cmpl-mine-01234567")
    for story in (*stories, over_http, ended("5f0c1a2b/other")):
        ring.keep(story)
    assert ring.find("mine", ()) == stories[::-1]
    assert ring.find("5f0c1a2b/mine", ()) == stories[:1]
    assert ring.find("cmpl-mine-01234567", ()) == [over_http]
    ring = StoryRing()
    ring.keep(over_http)
    assert ring.find("mine", ()) == [over_http]


def test_times_are_told_since_submission() -> None:
    story = Story("r", 100.0)
    for at_s in (100.5, 101.5):
        story.note(Moment.WAITS, at_s, ("a",), "why")
    told = story_told(story, 110.0)
    (event,) = told.events
    assert (told.age_s, event.at_s, event.last_s, event.times) == (10.0, 0.5, 1.5, 2)
    assert (event.moment, [*event.workers], event.reason) == ("waits", ["a"], "why")
