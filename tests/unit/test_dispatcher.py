"""The router's shell over the real core; the workers are links that only remember."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from typing import cast

import pytest

from kvrelay.counters import Counters
from kvrelay.errors import InvalidRequest, PeerError, Refused, RequestFailedError
from kvrelay.messages import Abort, Generate, ToWorker, WorkerEvent
from kvrelay.types import FinishReason, Incarnation, Objectives, RequestKey, Role
from router.core.events import Rejected
from router.core.policy.choice import Policies
from router.core.state.generation import RefusedUntil
from router.live import dispatcher
from router.live.dispatcher import MAX_REQUEST_ID_BYTES, WorkerDispatcher
from router.live.link import WorkerLink
from tests.unit.router_kit import hello, refused, request, reserved, tokens
from tests.unit.test_joining import of

B = Incarnation("b")


class Link:
    address = "host:1"

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.when_closed: Callable[[], None] = lambda: None

    async def close(self) -> None:
        self.when_closed()

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)


class Scene:
    def __init__(self, admission: str) -> None:
        self.dispatcher = WorkerDispatcher(policies=Policies(admission=admission))
        self.link = Link()
        self.dispatcher.joined(cast(WorkerLink, self.link), hello("b", Role.BOTH))

    def key(self) -> RequestKey:
        """Of the last request that was sent."""
        return [m.spec.key for m in self.link.sent if isinstance(m, Generate)][-1]

    def say(self, *events: WorkerEvent) -> None:
        mine = tuple(replace(event, key=self.key()) for event in events)
        self.dispatcher.said(B, mine, Counters(), ())

    async def admitted(self, name: str = "r"):  # type: ignore[no-untyped-def]
        submitting = asyncio.ensure_future(self.dispatcher.submit(request(name)))
        await asyncio.sleep(0)
        self.say(reserved())
        return await submitting


def play(scene: Callable[[Scene], Awaitable[None]], admission: str = "predictive") -> None:
    async def run() -> None:
        await scene(Scene(admission))

    asyncio.run(run())


def test_tokens_come_in_order_and_end() -> None:
    async def scene(s: Scene) -> None:
        generation = await s.admitted()
        s.say(tokens(0, 10), tokens(1, 11, reason=FinishReason.LENGTH))
        assert [t.token_ids async for t in generation] == [(10,), (11,)]
        assert s.dispatcher.running_requests() == 0
        assert not [m for m in s.link.sent if isinstance(m, Abort)]

    play(scene)


def test_what_was_said_before_a_rejected_event_is_delivered() -> None:
    """One request has ended, the other goes on elsewhere behind what was delivered."""

    async def scene(s: Scene) -> None:
        other = await s.admitted("other")
        others = s.key()
        ended = await s.admitted()
        said = (
            replace(tokens(0, 20), key=others),
            replace(tokens(0, 10, reason=FinishReason.LENGTH), key=s.key()),
            replace(tokens(0, 5, choice=7), key=others),
        )
        with pytest.raises(Rejected, match=r"^Tokens of other: IndexError"):
            s.dispatcher.said(B, said, Counters(), ())
        async with asyncio.timeout(10):
            assert [t.token_ids async for t in ended] == [(10,)]
        assert (await anext(aiter(other))).token_ids == (20,)
        assert s.dispatcher.core.state.requests["other"].choices[0].delivered == [20]

    play(scene)


def test_without_workers_an_admitted_request_waits_until_its_patience_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reports, so the dispatcher itself looks at who waits."""
    monkeypatch.setattr(dispatcher, "PERIOD_S", 0.01)

    async def scene(s: Scene) -> None:
        s.dispatcher.core.state.failover_patience_s = 0.3
        first = await s.admitted("first")
        s.dispatcher.lost(B, "it died")
        s.dispatcher.joined(cast(WorkerLink, s.link), hello("b", Role.BOTH))
        s.say(reserved(), tokens(0, 10, reason=FinishReason.LENGTH))
        assert [t.token_ids async for t in first] == [(10,)]
        second = await s.admitted("second")
        lost_s = time.monotonic()
        s.dispatcher.lost(B, "it died again")
        with pytest.raises(RequestFailedError, match=r"worker b was lost") as failure:
            async with asyncio.timeout(10):
                await anext(aiter(second))
        assert failure.value.reason == "worker_lost"
        assert not s.dispatcher._generations
        assert time.monotonic() - lost_s >= 0.3

    play(scene)


def test_what_stands_in_for_a_role_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "router")

    async def scene(s: Scene) -> None:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("d2", Role.DECODE)):
            s.dispatcher.joined(cast(WorkerLink, Link()), hello(name, role))
        caplog.clear()
        s.dispatcher.lost(Incarnation("d"), "it died")
        assert "no decode worker" not in caplog.text
        s.dispatcher.lost(Incarnation("d2"), "it died")
        assert "no decode worker is left: the others serve as both until one is back" in caplog.text
        s.dispatcher.joined(cast(WorkerLink, Link()), hello("d3", Role.DECODE))
        assert "a decode worker is back" in caplog.text

    play(scene)


def test_a_newcomers_dtype_is_compared_with_the_roles_that_the_others_have_by_now() -> None:
    """Of those that say "prefill" at first, one does the other's work since then."""

    async def scene(s: Scene) -> None:
        for name, role, dtype in (("p", Role.PREFILL, "float32"), ("q", Role.PREFILL, "float16")):
            s.dispatcher.joined(cast(WorkerLink, Link()), of(name, role, dtype))
        now_decodes = Counters(role=Role.DECODE, role_epoch=1)
        s.dispatcher.said(Incarnation("p"), (), now_decodes, ())
        s.dispatcher.joined(cast(WorkerLink, Link()), of("d", Role.DECODE, "float16"))
        with pytest.raises(PeerError, match="worker late has KV in float16, p in float32"):
            s.dispatcher.joined(cast(WorkerLink, Link()), of("late", Role.PREFILL, "float16"))

    play(scene)


def test_only_a_worker_that_goes_by_itself_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "router")

    async def scene(s: Scene) -> None:
        s.dispatcher._links["host:1"] = cast(WorkerLink, s.link)
        s.dispatcher.lost(B, "it closed the stream")
        s.dispatcher.joined(cast(WorkerLink, s.link), hello("b", Role.BOTH))
        s.link.when_closed = lambda: s.dispatcher.lost(B, "the link was closed")
        await s.dispatcher.remove_worker("host:1")

    play(scene)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("WARNING", "lost the worker at host:1: it closed the stream") in said
    assert said[-1] == ("INFO", "the worker at host:1 has left")


def test_a_request_whose_client_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_UNREAD_TOKENS", 3)
    monkeypatch.setattr(dispatcher, "MAX_UNREAD_OF_CHOICE", 0)

    async def scene(s: Scene) -> None:
        generation = await s.admitted()
        read = aiter(generation)
        s.say(tokens(0, 10), tokens(1, 11), tokens(2, 12))
        assert [(await anext(read)).token_ids for _ in range(3)] == [(10,), (11,), (12,)]
        s.say(*(tokens(index, index) for index in range(3, 7)))
        await asyncio.sleep(0)
        assert [m for m in s.link.sent if isinstance(m, Abort)], "its blocks are freed"
        assert s.dispatcher.running_requests() == 0
        with pytest.raises(RequestFailedError, match=r"4 tokens were waiting .* at most 3") as slow:
            await anext(read)
        assert slow.value.reason == "slow_reader"

    play(scene)


def test_what_can_never_be_served_is_invalid() -> None:
    async def scene(s: Scene) -> None:
        with pytest.raises(InvalidRequest, match="a worker runs at most 4 sequences") as wide:
            await s.dispatcher.submit(request(n=5))
        assert wide.value.param == "n"
        with pytest.raises(InvalidRequest, match="choose a shorter one") as long:
            await s.dispatcher.submit(request("é" * MAX_REQUEST_ID_BYTES))
        assert long.value.param == "request_id"
        await s.admitted()
        with pytest.raises(InvalidRequest, match="request id r is running already") as twice:
            await s.dispatcher.submit(request())
        assert twice.value.code == "duplicate_request_id"
        assert s.dispatcher.running_requests() == 1

    play(scene)


def test_a_refusal_is_raised_and_leaves_nothing() -> None:
    async def scene(s: Scene) -> None:
        s.dispatcher.lost(B, "gone")
        with pytest.raises(Refused) as refused:
            await s.dispatcher.submit(request())
        assert (refused.value.reason, refused.value.retry_after_s) == ("no_capacity", 1.0)
        assert not s.dispatcher._generations

    play(scene)


def test_a_watch_counts_what_was_admitted_and_refused() -> None:
    async def scene(s: Scene) -> None:
        before = s.dispatcher.watch_report().workers[0]
        assert not before.HasField("heard_ago_s")
        await s.admitted()
        s.dispatcher.core.state.workers[B].draining = True
        with pytest.raises(Refused):
            await s.dispatcher.submit(request("other"))
        told = s.dispatcher.watch_report()
        (tier,) = told.tiers
        counts = (tier.name, tier.open_requests, tier.admitted, tier.refused)
        assert counts == ("default", 1, 1, 1)
        assert told.workers[0].heard_ago_s >= 0
        assert told.not_ready == "all workers drain"

    play(scene)


def test_a_refusal_tells_its_promise_and_what_became_of_it_is_counted() -> None:
    async def scene(s: Scene) -> None:
        for number in range(4):
            await s.admitted(f"r{number}")
        with pytest.raises(RefusedUntil) as refused:
            await s.dispatcher.submit(request("full"))
        assert refused.value.retry_after_s == refused.value.told.due_in_s > 0
        with pytest.raises(RefusedUntil) as early:
            await s.dispatcher.submit(replace(request("full"), promise=refused.value.told))
        told = early.value.told
        assert told.promise_id == refused.value.told.promise_id, "it came too early"
        assert told.due_in_s <= refused.value.told.due_in_s
        outcomes = dict.fromkeys(("kept", "broken", "given_up", "expired", "forgotten"), 0)
        assert s.dispatcher.snapshot().promises == outcomes
        s.dispatcher.core.state.promises.expire(inf)
        assert s.dispatcher.snapshot().promises == outcomes | {"expired": 1}

    play(scene)


def test_an_old_generation_does_not_end_the_next_one_of_its_name() -> None:
    async def scene(s: Scene) -> None:
        old = await s.admitted()
        s.say(tokens(0, 10, reason=FinishReason.LENGTH))
        new = await s.admitted()
        old.stop(0, 1)
        old.abort()
        assert [t.token_ids async for t in old] == [(10,)]
        s.say(tokens(0, 20, reason=FinishReason.LENGTH))
        assert [t.token_ids async for t in new] == [(20,)]

    play(scene)


def test_abort_by_id_ends_the_iteration_and_tells_the_worker() -> None:
    async def scene(s: Scene) -> None:
        generation = await s.admitted()
        s.dispatcher.abort("r")
        s.dispatcher.abort("unknown")
        assert [t async for t in generation] == []
        assert s.link.sent[-1] == Abort(key=s.key())
        assert not s.dispatcher._generations

    play(scene)


def test_a_client_that_gives_up_before_admission_frees_its_place() -> None:
    async def scene(s: Scene) -> None:
        submitting = asyncio.ensure_future(s.dispatcher.submit(request()))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert s.link.sent[-1] == Abort(key=s.key())
        assert s.dispatcher.running_requests() == 0
        assert not s.dispatcher._generations

    play(scene)


def test_a_deadline_counts_from_when_the_request_was_received() -> None:
    async def scene(s: Scene) -> None:
        asked = replace(request(), objectives=Objectives(deadline_s=60.01), phases_s={"wait": 60})
        begun_s = time.monotonic()
        submitting = asyncio.ensure_future(s.dispatcher.submit(asked))
        await asyncio.sleep(0)
        s.say(reserved())
        generation = await submitting
        with pytest.raises(RequestFailedError, match="deadline of 60") as failure:
            [t async for t in generation]
        assert failure.value.reason == "deadline_exceeded"
        assert 0.009 <= time.monotonic() - begun_s < 30
        assert s.link.sent[-1] == Abort(key=s.key())
        assert not s.dispatcher._generations

    play(scene, admission="none")


def test_a_deadline_that_passes_before_admission() -> None:
    async def scene(s: Scene) -> None:
        asked = replace(request(), objectives=Objectives(deadline_s=0.01))
        with pytest.raises(RequestFailedError, match="deadline"):
            await s.dispatcher.submit(asked)
        assert s.link.sent[-1] == Abort(key=s.key())

    play(scene, admission="none")


def test_the_deadline_of_a_request_that_ended_is_not_that_of_the_next_one_of_its_name() -> None:
    async def scene(s: Scene) -> None:
        asked = replace(request(), objectives=Objectives(deadline_s=0.01))
        submitting = asyncio.ensure_future(s.dispatcher.submit(asked))
        await asyncio.sleep(0)
        s.say(reserved(), tokens(0, 10, reason=FinishReason.LENGTH))
        await submitting
        new = await s.admitted()
        await asyncio.sleep(0.02)
        assert s.dispatcher.runs(new)

    play(scene, admission="none")


def test_a_worker_that_drains_makes_the_router_not_ready() -> None:
    async def scene(s: Scene) -> None:
        assert s.dispatcher.ready()
        submitting = asyncio.ensure_future(s.dispatcher.submit(request()))
        await asyncio.sleep(0)
        s.say(refused("draining"))
        with pytest.raises(Refused):
            await submitting
        assert not s.dispatcher.ready()
        assert s.dispatcher.not_ready() == "all workers drain"

    play(scene)
