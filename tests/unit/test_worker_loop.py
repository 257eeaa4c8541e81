"""What a worker's loop answers to which router. Driven through its inbox; the engine says 7."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.worker.core import WorkerCore
from cluster.core.worker.events import DropPeer, FromRouter, MoveJob, RouterJoined, RouterLost
from cluster.process.trace import NO_TRACE, Trace, Value
from cluster.worker.events import Incoming, RunOnLoop
from cluster.worker.loop import WorkerLoop
from cluster.worker.process import WorkerProcess
from engine.core.correction import StepPace
from engine.core.step import RunStep, Sampled, StepBatch, StepDone, StepOutcome
from engine.core.step_times import LinearTimes, decode_work, prefill_work
from kvpool.core.blocks.news import RunNews
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.transfer.commands import DropLink, SendPeer
from kvrelay.counters import Counters, LinkState
from kvrelay.messages import (
    Abort,
    BlockChanges,
    Generate,
    Lifetime,
    Prefill,
    Preload,
    Released,
    Reserved,
    ReserveRefused,
    RouterLeaving,
    Stop,
    Suspect,
    Tokens,
    ToWorker,
    WorkerEvent,
)
from kvrelay.types import Incarnation, RequestSpec, Role
from prefill_worker.scheduler import PrefillScheduler
from tests.integration.split_kit import worker_settings
from tests.unit.router_kit import STEP_TIMES
from tests.unit.worker_kit import BLOCK, D, decode_scheduler, key, reserve, spec

TIMES = LinearTimes.of(STEP_TIMES)


class Device:
    """Ends the step that it was given when it is told to."""

    def __init__(self, at_once: int = 1) -> None:
        self.batches: list[StepBatch] = []
        self.launched: deque[StepBatch] = deque()
        self._at_once = at_once

    @property
    def running(self) -> StepBatch | None:
        return self.launched[0] if self.launched else None

    def submit(self, step: RunStep) -> None:
        assert len(self.launched) < self._at_once
        self.batches.append(step.batch)
        self.launched.append(step.batch)

    def end_step(self) -> StepDone:
        batch = self.launched.popleft()
        sampled = tuple(tuple(Sampled(token_id=7) for _ in s.samples) for s in batch.slices)
        return StepDone(outcome=StepOutcome(sampled=sampled), seconds=0.0)


class Stream:
    def __init__(self) -> None:
        self.heard: list[WorkerEvent] = []
        self.counters = Counters()
        self.told: list[Counters] = []
        self.blocks: list[BlockChanges] = []

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None:
        self.heard += events
        self.counters = counters
        self.told.append(counters)
        self.blocks += blocks

    def about(self, name: str) -> list[str]:
        return [type(e).__name__ for e in self.heard if e.key == key(name) and _counts(e)]


def _counts(event: WorkerEvent) -> bool:
    return not isinstance(event, Lifetime)


class Links:
    """Peers that hear nothing."""

    def __init__(self) -> None:
        self.dropped: list[Incarnation] = []

    def send(self, command: SendPeer) -> None:
        pass

    def part(self, command: DropPeer) -> None:
        self.dropped.append(command.peer)

    def drop(self, command: DropLink) -> None:
        pass

    def states(self) -> tuple[LinkState, ...]:
        return ()


class Mover:
    """Nothing is moved in these tests."""

    def put(self, job: MoveJob) -> None:
        raise AssertionError(job)


class Harness:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        launches_ahead: bool = False,
        prompt_steps: int = 1,
        trace: Trace = NO_TRACE,
    ) -> None:
        decode = decode_scheduler(blocks=8)
        lookup = decode.batch.lookup
        prefill = PrefillScheduler(lookup=lookup, chunk_tokens=8)
        self.inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self.device = Device(at_once=max(1 + launches_ahead, prompt_steps))
        self.pace = StepPace(TIMES)
        self.core = WorkerCore(
            lookup,
            prefill,
            decode,
            self.pace,
            max_model_len=16,
            role=Role.DECODE,
            chunk_tokens={Role.DECODE: 8, Role.PREFILL: 64}.__getitem__,
            launches_ahead=launches_ahead,
            prompt_steps=prompt_steps,
        )
        self.links = Links()
        self.loop = WorkerLoop(
            self.core, self.device, self.links, Mover(), None, self.inbox, clock=clock, trace=trace
        )

    @property
    def decode_tables(self) -> BlockTables:
        return self.core.tables

    def router(self) -> Stream:
        stream = Stream()
        self.inbox.put(RouterJoined(stream))
        return stream

    def say(self, stream: Stream, *messages: ToWorker) -> None:
        for message in messages:
            self.inbox.put(FromRouter(stream, message))

    def run(self) -> None:
        """All that lies in the inbox, and the end of the step that runs after it."""
        self.inbox.put(RunOnLoop(lambda: None))
        self.loop.turn()
        if self.device.running is not None:
            self.inbox.put(self.device.end_step())
            self.loop.turn()


def generate(name: str, *, max_tokens: int = 1) -> Generate:
    return Generate(spec=spec(name, 3, max_tokens=max_tokens))


def prefill(request: RequestSpec) -> Prefill:
    return Prefill(spec=request, target_addresses=("loopback:nowhere",), target=D)


def test_events_go_to_the_router_that_asked() -> None:
    worker = Harness()
    one, other = worker.router(), worker.router()
    worker.say(one, generate("a"))
    worker.say(other, generate("b"))
    worker.run()
    for stream, name in ((one, "a"), (other, "b")):
        assert stream.about(name) == ["Reserved", "Tokens", "Released"]
        assert {event.key for event in stream.heard} == {key(name)}
    assert worker.core.idle


def test_a_peer_that_a_router_suspects_is_dropped_at_once() -> None:
    worker = Harness()
    worker.say(worker.router(), Suspect(incarnation=D))
    worker.run()
    assert worker.links.dropped == [D]


def test_all_hear_that_a_router_leaves_which_counts_no_more() -> None:
    worker = Harness()
    leaves, stays = worker.router(), worker.router()
    worker.run()
    assert (leaves.counters.routers, stays.counters.routers) == (2, 2)
    worker.say(leaves, RouterLeaving())
    worker.run()
    assert (leaves.counters.routers, stays.counters.routers) == (1, 1)
    worker.inbox.put(RouterLost(leaves))
    worker.run()
    assert stays.counters.routers == 1
    assert worker.router() and worker.run() is None
    assert stays.counters.routers == 2


def test_routers_hear_of_all_blocks_then_of_new_ones() -> None:
    worker = Harness()
    worker.decode_tables.device.changes = RunNews(worker.decode_tables.device.tree)
    early = worker.router()
    worker.say(early, Generate(spec=spec("a", 9, max_tokens=1)))
    worker.run()
    worker.run()
    assert early.about("a") == ["Reserved", "Tokens", "Released"]
    late = worker.router()
    worker.run()
    assert len(_stored(early)) == 2
    assert _stored(late) == _stored(early)
    worker.say(late, Generate(spec=spec("b", 13, max_tokens=1)))
    worker.run()
    assert len(_stored(late)) == 3
    assert _stored(late) == _stored(early)


def _stored(stream: Stream) -> list[bytes]:
    packed = b"".join(run.hashes for changes in stream.blocks for run in changes.stored)
    return [*BlockHashes(packed)]


def test_a_repeated_key_is_refused_and_the_first_goes_on() -> None:
    worker = Harness()
    one, other = worker.router(), worker.router()
    worker.say(one, generate("a"))
    worker.say(other, generate("a"), prefill(spec("a", 3)), Abort(key=key("a")))
    worker.say(other, Stop(key=key("a"), choice=0, valid_tokens=0))
    worker.run()
    assert [e.reason for e in other.heard if isinstance(e, ReserveRefused)] == [
        "duplicate_request",
        "duplicate_request",
    ]
    assert one.about("a") == ["Reserved", "Tokens", "Released"]


def test_a_router_that_is_gone_takes_its_requests_along() -> None:
    worker = Harness()
    gone, stays = worker.router(), worker.router()
    worker.say(gone, generate("a", max_tokens=9))
    worker.say(stays, generate("b", max_tokens=9))
    worker.inbox.put(RouterLost(gone))
    worker.run()
    assert gone.heard == []
    assert {s.key for batch in worker.device.batches for s in batch.slices} == {key("b")}
    worker.inbox.put(RouterLost(stays))
    worker.run()
    assert worker.core.idle
    assert worker.decode_tables.free_blocks == worker.decode_tables.blocks


def test_each_router_hears_at_once_of_what_came_from_another() -> None:
    worker = Harness()
    one, other = worker.router(), worker.router()
    worker.run()
    worker.say(one, generate("a", max_tokens=2))
    worker.loop.turn()
    assert (one.counters.running, other.counters.running) == (1, 1)
    assert other.heard == []
    told = len(other.told)
    worker.run()
    worker.run()
    assert worker.core.idle and other.counters.running == 0
    assert len(other.told) > told
    told = len(other.told)
    worker.run()
    assert len(other.told) == told, "nothing is new"


def preload(tokens: int) -> Preload:
    return Preload(spec=spec("p", tokens, max_tokens=1))


def pinned(worker: Harness) -> int:
    return sum(held.holder.side == "pinned" for held in worker.decode_tables.held())


def test_what_several_routers_want_preloaded_is_computed_once() -> None:
    worker = Harness()
    one, other = worker.router(), worker.router()
    worker.say(one, preload(9))
    worker.say(other, preload(9))
    worker.run()
    worker.run()
    assert pinned(worker) == 1
    third = worker.router()
    worker.say(third, preload(9))
    worker.run()
    assert len(worker.device.batches) == 2, "two chunks, once"
    assert other.heard == third.heard == []


def test_a_preload_outlives_the_router_that_asked_for_it() -> None:
    worker = Harness()
    first, second = worker.router(), worker.router()
    worker.say(first, preload(9))
    worker.say(second, preload(9))
    worker.loop.turn()
    worker.inbox.put(RouterLost(first))
    worker.inbox.put(worker.device.end_step())
    worker.run()
    assert pinned(worker) == 1
    assert worker.core.idle


@pytest.mark.parametrize("steps", [0, 1])
def test_a_preload_ends_when_the_worker_drains(steps: int) -> None:
    """Between two steps, or while one runs."""
    worker = Harness()
    stream = worker.router()
    worker.say(stream, preload(15))
    worker.loop.turn()
    if steps:
        worker.inbox.put(worker.device.end_step())
    worker.inbox.put(RunOnLoop(worker.core.drain))
    worker.loop.turn()
    if worker.device.running is not None:
        worker.inbox.put(worker.device.end_step())
        worker.loop.turn()
    assert worker.core.idle
    assert len(worker.device.batches) == 1, "of its two chunks"
    assert pinned(worker) == 0
    assert worker.decode_tables.free_blocks == worker.decode_tables.blocks
    worker.say(stream, preload(9))
    worker.run()
    assert worker.core.idle, "it begins none"


def test_a_late_message_of_a_router_that_is_gone_harms_nobody() -> None:
    worker = Harness()
    gone = worker.router()
    worker.inbox.put(RouterLost(gone))
    worker.core.draining = True
    worker.say(gone, generate("a"), Abort(key=key("a")))
    worker.run()
    assert gone.heard == []
    assert worker.core.idle


def test_a_running_step_holds_up_no_answer() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=2))
    worker.loop.turn()
    assert worker.device.running is not None
    worker.say(stream, generate("b", max_tokens=2))
    worker.loop.turn()
    assert stream.about("b") == ["Reserved"]
    assert len(worker.device.batches) == 1


def test_the_schedulers_take_turns_at_the_device() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=9), prefill(spec("p", 20)))
    for _ in range(4):
        worker.run()
    ran = [batch.slices[0].key for batch in worker.device.batches[:4]]
    assert ran == [key("a"), key("p"), key("a"), key("p")]


def test_a_draining_worker_refuses_the_new_and_finishes_the_old() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=2))
    worker.run()
    worker.core.draining = True
    worker.say(stream, generate("b"))
    worker.run()
    assert stream.about("a") == ["Reserved", "Tokens", "Tokens", "Released"]
    (refused,) = [e for e in stream.heard if e.key == key("b")]
    assert isinstance(refused, ReserveRefused)
    assert refused.reason == "draining"
    assert worker.core.idle


def test_a_worker_that_drains_tells_every_router_at_once() -> None:
    worker = Harness()
    streams = [worker.router(), worker.router()]
    worker.run()
    assert not any(stream.counters.draining for stream in streams)
    worker.inbox.put(RunOnLoop(worker.core.drain))
    worker.loop.turn()
    assert all(stream.counters.draining for stream in streams)


def test_a_draining_worker_finishes_the_prompts_it_has_and_takes_no_more() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, prefill(spec("queued", 20)))
    worker.loop.turn()
    worker.inbox.put(RunOnLoop(worker.core.drain))
    worker.say(stream, prefill(spec("new", 20)))
    for _ in range(4):
        worker.run()
    assert {piece.key for batch in worker.device.batches for piece in batch.slices} == {
        key("queued")
    }
    assert sum(len(batch.slices[0].token_ids) for batch in worker.device.batches) == 20
    assert stream.about("new") == ["ReserveRefused"]


def test_what_leaves_a_draining_worker_is_prefilled_there_and_its_attempt_ends() -> None:
    """It is never without both, so that it does not stop in between."""
    worker = Harness()
    stream, other = worker.router(), worker.router()
    worker.say(stream, generate("a", max_tokens=9))
    worker.run()
    worker.inbox.put(RunOnLoop(worker.core.drain))
    old = key("a")
    goes_on = replace(spec("a", 4, max_tokens=9), key=old._replace(attempt=old.attempt + 1))
    moved = replace(prefill(goes_on), leaves=old.attempt)
    worker.say(other, replace(moved, spec=replace(goes_on, key=key("b"))))
    worker.run()
    assert [type(e) for e in stream.heard if e.key == old][-1] is Tokens, "only its own router may"
    worker.say(stream, moved)
    worker.inbox.put(RunOnLoop(lambda: None))
    worker.loop.turn()
    assert [type(e) for e in stream.heard if e.key == old][-1] is Released
    assert not worker.core.idle
    assert not any(isinstance(e, ReserveRefused) for e in stream.heard)


def test_another_role_is_told_to_every_router_at_once() -> None:
    worker = Harness()
    streams = [worker.router(), worker.router()]
    worker.run()
    assert {(one.counters.role, one.counters.role_epoch) for one in streams} == {(Role.DECODE, 0)}
    worker.inbox.put(RunOnLoop(lambda: worker.core.take_role(Role.PREFILL)))
    worker.loop.turn()
    assert {(one.counters.role, one.counters.role_epoch) for one in streams} == {(Role.PREFILL, 1)}
    assert worker.core.decode.batch.chunk_tokens == 64, "nobody who decodes waits for a prompt"
    told = [len(one.told) for one in streams]
    worker.inbox.put(RunOnLoop(lambda: worker.core.take_role(Role.PREFILL)))
    worker.loop.turn()
    assert [len(one.told) for one in streams] == told, "nothing new"


def test_a_refused_request_leaves_no_route() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, Generate(spec=spec("a", 8 * BLOCK)))
    worker.run()
    assert [type(e) for e in stream.heard] == [ReserveRefused]
    assert worker.core.idle


def test_counters_ride_on_events() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=2))
    worker.run()
    assert [type(e) for e in stream.heard if _counts(e)] == [Reserved, Tokens]
    assert (stream.counters.running, stream.counters.active_blocks) == (1, 1)
    assert (stream.counters.prompt_tokens, stream.counters.generated_tokens) == (3, 1)
    worker.run()
    assert isinstance(stream.heard[-1], Released)
    assert (stream.counters.running, stream.counters.active_blocks) == (0, 0)
    assert (stream.counters.free_blocks, stream.counters.cached_blocks) == (7, 1)


def test_counters_say_what_decode_steps_take_now() -> None:
    worker = Harness()
    router = worker.router()
    worker.say(router, generate("a", max_tokens=3), reserve(spec("b", 4, n=2)))
    worker.run()
    told = router.counters
    assert (told.decode_sequences, told.decode_kv_tokens, told.reserved_sequences) == (1, 3, 2)
    worker.run()
    assert router.counters.decode_kv_tokens == 4
    worker.run()
    assert (router.counters.decode_sequences, router.counters.decode_kv_tokens) == (0, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def step(worker: Harness, clock: Clock, seconds: float) -> None:
    """What lies in the inbox begins a step, if none runs; then it ends."""
    worker.inbox.put(RunOnLoop(lambda: None))
    worker.loop.turn()
    clock.now_s += seconds
    worker.inbox.put(worker.device.end_step())
    worker.loop.turn()


def test_steps_that_take_longer_than_told_are_told() -> None:
    clock = Clock()
    worker = Harness(clock)
    router = worker.router()
    worker.say(router, generate("a", max_tokens=3))
    step(worker, clock, 0.5 * TIMES.step_s(prefill_work(3)))
    assert router.counters.prefill_correction < 1
    assert router.counters.decode_correction == 1
    step(worker, clock, 2 * TIMES.step_s(decode_work(1, 3)))
    assert router.counters.prefill_correction < 1 < router.counters.decode_correction


class Told:
    """A trace that only keeps what took time."""

    def __init__(self) -> None:
        self.took_s: list[tuple[str, float, dict[str, Value]]] = []

    def span(self, name: str, **args: Value) -> AbstractContextManager[None]:
        return nullcontext()

    def took(self, name: str, started_s: float, **args: Value) -> None:
        self.took_s.append((name, started_s, args))

    def on_device(
        self, name: str, stream: object = None, **args: Value
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def queued(self, name: str, **args: Value) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


def test_a_trace_tells_each_step_with_what_was_predicted_and_each_turn() -> None:
    """Without a correction, which the simulator learns by itself."""
    clock, told = Clock(), Told()
    worker = Harness(clock, trace=told)
    worker.say(worker.router(), generate("a", max_tokens=3))
    begun_s = clock.now_s
    for work in (prefill_work(3), decode_work(1, 3), decode_work(1, 4)):
        step(worker, clock, 2 * TIMES.step_s(work))
    steps = [args for name, _, args in told.took_s if name == "stepped"]
    assert [one["kind"] for one in steps] == ["prefill", "decode", "decode"]
    predicted = [round(1e9 * TIMES.step_s(w)) for w in (prefill_work(3), decode_work(1, 3))]
    assert [one["predicted_ns"] for one in steps[:2]] == predicted
    turns = [at_s for name, at_s, _ in told.took_s if name == "turn"]
    assert len(turns) == 6 and turns[0] == begun_s


def test_a_worker_without_work_is_not_slow() -> None:
    clock = Clock()
    worker = Harness(clock)
    router = worker.router()
    for name in ("a", "b"):
        clock.now_s += 100
        worker.say(router, generate(name))
        step(worker, clock, TIMES.step_s(prefill_work(3)))
    assert router.counters.prefill_correction == pytest.approx(1)


def test_a_process_answers_when_its_loop_comes_round_and_not_before() -> None:
    """Its event loop alone is no sign of life."""

    async def scene() -> None:
        worker = WorkerProcess(worker_settings("both-0", Role.BOTH, Path("/no/such/model")))
        answer = asyncio.ensure_future(worker.answer())
        while worker._inbox.empty():
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not answer.done()
        call = worker._inbox.get_nowait()
        assert isinstance(call, RunOnLoop)
        await asyncio.to_thread(call.function)
        await asyncio.wait_for(answer, 30)

    asyncio.run(scene())


def test_the_next_step_is_launched_before_the_first_has_ended() -> None:
    now_s = [0.0]
    worker = Harness(lambda: now_s[0], launches_ahead=True)
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=5))
    worker.loop.turn()
    assert len(worker.device.launched) == 1, "its prompt comes first"
    worker.run()
    assert len(worker.device.launched) == 2
    steps = len(worker.device.batches)
    while worker.device.launched:
        now_s[0] += 0.5
        worker.inbox.put(worker.device.end_step())
        worker.loop.turn()
        assert len(worker.device.launched) <= 2
    follows = [batch.slices[0].follows for batch in worker.device.batches]
    assert follows == [None, None, 0, 0, 0] and steps < 5
    ids = [token for e in stream.heard if isinstance(e, Tokens) for token in e.token_ids]
    assert ids == [7] * 5 and worker.core.idle


def test_each_step_s_time_is_learnt_by_itself() -> None:
    """Of two on the device the second begins when the first has ended."""
    now_s = [0.0]
    worker = Harness(lambda: now_s[0], launches_ahead=True)
    worker.say(worker.router(), generate("a", max_tokens=6))
    worker.run()
    step_s = TIMES.step_s(decode_work(1, 4))
    while worker.device.launched:
        now_s[0] += 3 * step_s
        worker.inbox.put(worker.device.end_step())
        worker.loop.turn()
    assert 1.5 < worker.pace.decode.factor < 3.1


def test_a_prompt_has_its_turn_before_the_next_step() -> None:
    worker = Harness(launches_ahead=True)
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=9))
    worker.run()
    assert len(worker.device.launched) == 2
    worker.say(stream, prefill(spec("b", 3)))
    worker.inbox.put(worker.device.end_step())
    worker.loop.turn()
    before = len(worker.device.batches)
    while worker.device.batches[-1].slices[0].key != key("b"):
        worker.inbox.put(worker.device.end_step())
        worker.loop.turn()
    assert len(worker.device.batches) <= before + 1
