"""What a worker's loop answers to which router. Driven through its inbox; the engine says 7."""

from __future__ import annotations

import queue

from cluster.worker_loop import Close, FromRouter, Incoming, RouterJoined, RouterLost, WorkerLoop
from engine.step import Sampled, StepBatch, StepOutcome
from kvpool.tables import CopyPairs
from kvrelay.messages import (
    Abort,
    Counters,
    Generate,
    Lifetime,
    Prefill,
    Released,
    Reserved,
    ReserveRefused,
    Stop,
    Tokens,
    ToWorker,
    WorkerEvent,
)
from kvrelay.types import RequestSpec
from prefill_worker.scheduler import PrefillScheduler
from tests.unit.worker_kit import BLOCK, D, decode_scheduler, key, spec


class Engine:
    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepOutcome:
        self.batches.append(batch)
        return StepOutcome(
            sampled=tuple(tuple(Sampled(token_id=7) for _ in s.samples) for s in batch.slices)
        )

    def copy_blocks(self, pairs: CopyPairs) -> None:
        raise AssertionError("no choices here")


class Stream:
    def __init__(self) -> None:
        self.heard: list[WorkerEvent] = []
        self.counters = Counters()

    def send(self, events: list[WorkerEvent], counters: Counters) -> None:
        self.heard += events
        self.counters = counters

    def about(self, name: str) -> list[str]:
        return [type(e).__name__ for e in self.heard if e.key == key(name) and _counts(e)]


def _counts(event: WorkerEvent) -> bool:
    return not isinstance(event, Lifetime)


class Harness:
    def __init__(self) -> None:
        decode = decode_scheduler(blocks=8)
        prefill = PrefillScheduler(tables=decode.batch.tables, chunk_tokens=8, slab_tokens=8)
        self.inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self.engine = Engine()
        self.loop = WorkerLoop(self.engine, decode.batch.tables, prefill, decode, self.inbox)

    def router(self) -> Stream:
        stream = Stream()
        self.inbox.put(RouterJoined(stream))
        return stream

    def say(self, stream: Stream, *messages: ToWorker) -> None:
        for message in messages:
            self.inbox.put(FromRouter(stream, message))

    def run(self) -> None:
        """All that lies in the inbox, and one step of each scheduler after it."""
        self.inbox.put(Close())
        self.loop.run()
        self.loop._closing = False


def generate(name: str, *, max_tokens: int = 1) -> Generate:
    return Generate(spec=spec(name, 3, max_tokens=max_tokens))


def prefill(request: RequestSpec) -> Prefill:
    return Prefill(spec=request, target_address="loopback:nowhere", target=D)


def test_events_go_to_the_router_that_asked() -> None:
    worker = Harness()
    one, other = worker.router(), worker.router()
    worker.say(one, generate("a"))
    worker.say(other, generate("b"))
    worker.run()
    for stream, name in ((one, "a"), (other, "b")):
        assert stream.about(name) == ["Reserved", "Tokens", "Released"]
        assert {event.key for event in stream.heard} == {key(name)}
    assert worker.loop.idle


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
    assert [s.key for batch in worker.engine.batches for s in batch.slices] == [key("b")]
    worker.inbox.put(RouterLost(stays))
    worker.run()
    assert worker.loop.idle
    assert worker.loop._tables.free_blocks == worker.loop._tables.blocks


def test_a_late_message_of_a_router_that_is_gone_harms_nobody() -> None:
    worker = Harness()
    gone = worker.router()
    worker.inbox.put(RouterLost(gone))
    worker.loop.draining = True
    worker.say(gone, generate("a"), Abort(key=key("a")))
    worker.run()
    assert gone.heard == []
    assert worker.loop.idle


def test_a_draining_worker_refuses_the_new_and_finishes_the_old() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, generate("a", max_tokens=2))
    worker.run()
    worker.loop.draining = True
    worker.say(stream, generate("b"))
    worker.run()
    assert stream.about("a") == ["Reserved", "Tokens", "Tokens", "Released"]
    (refused,) = [e for e in stream.heard if e.key == key("b")]
    assert isinstance(refused, ReserveRefused)
    assert refused.reason == "draining"
    assert worker.loop.idle


def test_a_refused_request_leaves_no_route() -> None:
    worker = Harness()
    stream = worker.router()
    worker.say(stream, Generate(spec=spec("a", 8 * BLOCK)))
    worker.run()
    assert [type(e) for e in stream.heard] == [ReserveRefused]
    assert worker.loop.idle


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
    assert (stream.counters.running, stream.counters.free_blocks) == (0, 8)
