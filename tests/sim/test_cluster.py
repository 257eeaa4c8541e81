"""Random schedules of a whole cluster: every admitted request ends with its right tokens, once and
in order, or with a typed failure; nothing is left held, by a worker or in the router's books."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from kvpool.handoff import HandoffMode
from kvpool.slabs import SlabState
from kvrelay.types import FinishReason, RequestSpec, Role
from router.events import Aborted, Admit, ChoiceStopped, Command, Deliver, Fail, Refuse, Submitted
from router.generation import ChoiceTokens, GenerationRequest
from tests.sim.cluster import Cluster
from tests.sim.model import ROW_BYTES, expected, make_spec
from tests.sim.worker import Shape

BLOCKS = 14


@dataclass(slots=True)
class Call:
    """What one client saw of one request. `cut` says after how many tokens it stops a choice."""

    spec: RequestSpec
    cut: dict[int, int]
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    admitted: bool = False
    ended: str | None = None

    def take(self, tokens: ChoiceTokens) -> None:
        choice = tokens.choice
        assert choice not in self.reasons, "tokens after the last one"
        assert choice not in self.stopped, "tokens after a stop"
        self.tokens[choice] += tokens.token_ids
        if tokens.finish_reason is not None:
            self.reasons[choice] = tokens.finish_reason

    def check(self) -> None:
        """A right beginning always, the whole when it ended well."""
        for choice in range(self.spec.sampling.n):
            right, reason = expected(self.spec, choice)
            got = self.tokens[choice]
            assert got == right[: len(got)], (self.spec.key, choice, got, right)
            if self.ended == "done" and choice not in self.stopped:
                assert (got, self.reasons[choice]) == (right, reason)


class Clients:
    def __init__(self, seed: int, requests: int, mode: HandoffMode = HandoffMode.PUSH) -> None:
        self.mode = mode
        self.rng = random.Random(seed)
        self.cluster = Cluster(seed, self.hear)
        self.calls: dict[str, Call] = {}
        for number in range(requests):
            spec = make_spec(self.rng, number)
            wanted = range(spec.sampling.n)
            cut = {c: self.rng.randint(1, 6) for c in wanted if self.rng.random() < 0.2}
            self.calls[spec.key.request_id] = Call(spec=spec, cut=cut)
            self.submit(spec.key.request_id, self.rng.uniform(0, 2))

    def submit(self, request_id: str, delay_s: float) -> None:
        spec = self.calls[request_id].spec
        request = GenerationRequest(
            request_id=request_id, prompt_ids=spec.prompt_ids, sampling=spec.sampling
        )
        event = Submitted(request=request)
        self.cluster.after(f"client {request_id}", lambda: self.cluster.to_router(event), delay_s)

    def abort(self, request_id: str) -> None:
        call = self.calls[request_id]
        if call.ended is None and request_id in self.cluster.core.requests:
            call.ended = "aborted"
            self.cluster.to_router(Aborted(request_id=request_id))

    def hear(self, command: Command) -> None:
        call = self.calls[command.request_id]
        assert call.ended is None, f"{command} after {call.ended}"
        match command:
            case Admit():
                assert not call.admitted
                call.admitted = True
            case Refuse(request_id=request_id, retry_after_s=retry_after_s):
                assert not call.admitted
                self.submit(request_id, retry_after_s)
            case Deliver(request_id=request_id, tokens=tokens, done=done):
                assert call.admitted
                for piece in tokens:
                    call.take(piece)
                call.ended = "done" if done else None
                self.cluster.after(f"client {request_id}", lambda: self.stop(request_id))
            case Fail(reason=reason):
                call.ended = f"failed: {reason}"

    def stop(self, request_id: str) -> None:
        call = self.calls[request_id]
        for choice, after in call.cut.items():
            due = len(call.tokens[choice]) >= after and choice not in call.reasons
            if due and choice not in call.stopped and call.ended is None:
                call.stopped.add(choice)
                stop = ChoiceStopped(request_id=request_id, choice=choice, valid_tokens=after)
                self.cluster.to_router(stop)
                if request_id not in self.cluster.core.requests:
                    call.ended = "done"

    def finish(self) -> Counter[str]:
        """Run to the end and check all that must hold then; how the requests ended."""
        self.cluster.run()
        self.cluster.settle()
        assert not self.cluster.core.requests
        for call in self.calls.values():
            assert call.ended is not None, f"{call.spec.key} never ended"
            call.check()
        for view in self.cluster.core.workers.values():
            assert not view.sequences, view.sequences
            assert not view.prompt_tokens, view.prompt_tokens
        assert_nothing_held(self.cluster)
        return Counter(call.ended or "" for call in self.calls.values())


def assert_nothing_held(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.validate()
        assert worker.tables.free_blocks == worker.tables.blocks, list(worker.tables.held())
        slabs = worker.decode.receiver.slabs
        assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(cluster.now_s)
        assert worker.decode.sequences == 0
        assert worker.prefill.handing_over == worker.prefill.waiting == 0
        assert not worker.routes


def start(clients: Clients, *, prefill: int = 0, decode: int = 0, both: int = 0) -> None:
    cluster = clients.cluster
    for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both)):
        for i in range(number):
            shape = Shape(
                role=role,
                blocks=clients.rng.choice([BLOCKS, 20, 40]),
                slabs=clients.rng.choice([1, 2]),
                slab_bytes=ROW_BYTES * clients.rng.choice([8, 64]),
                mode=clients.mode,
            )
            cluster.start_worker(f"{role}-{i}", shape)


def disturb(clients: Clients, moments: int) -> None:
    """At random moments kill a worker, break a router's stream or the link of two workers."""
    cluster, rng = clients.cluster, clients.rng

    def strike() -> None:
        victims = sorted(cluster.workers)
        if not victims:
            return
        victim = rng.choice(victims)
        match rng.randrange(3):
            case 0:
                cluster.kill(victim)
            case 1:
                cluster.break_stream(victim)
            case _:
                for peer in sorted(cluster.workers[victim].links):
                    cluster.cut(victim, peer)

    for i in range(moments):
        cluster.after(f"strike {i}", strike, rng.uniform(0.2, 4))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "shape",
    [
        {"prefill": 1, "decode": 1},
        {"prefill": 2, "decode": 2},
        {"prefill": 1, "decode": 1, "both": 1},
    ],
    ids=["1p1d", "2p2d", "1p1d1b"],
)
def test_undisturbed_every_request_is_done(seed: int, shape: dict[str, int]) -> None:
    clients = Clients(seed, requests=20)
    start(clients, **shape)
    assert clients.finish() == {"done": 20}


@pytest.mark.parametrize("seed", range(8))
def test_clients_that_leave_free_everything(seed: int) -> None:
    clients = Clients(seed, requests=20)
    start(clients, prefill=2, decode=2, both=1)
    for request_id in clients.calls:
        if clients.rng.random() < 0.6:
            clients.cluster.after(f"leave {request_id}", lambda r=request_id: clients.abort(r), 2.0)
    assert set(clients.finish()) <= {"done", "aborted"}


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", range(20))
def test_deaths_and_broken_links_lose_nothing(seed: int, mode: HandoffMode) -> None:
    clients = Clients(seed, requests=20, mode=mode)
    start(clients, prefill=2, decode=2, both=seed % 2)
    disturb(clients, moments=8)
    for request_id in clients.calls:
        if clients.rng.random() < 0.2:
            clients.cluster.after(f"leave {request_id}", lambda r=request_id: clients.abort(r), 2.0)
    ends = clients.finish()
    assert ends["done"] > 0, ends


def test_most_requests_survive_deaths() -> None:
    ends: Counter[str] = Counter()
    for seed in range(8):
        clients = Clients(seed, requests=20)
        start(clients, prefill=2, decode=2)
        disturb(clients, moments=3)
        ends += clients.finish()
    assert ends["done"] > 0.9 * ends.total(), ends


def test_an_id_that_comes_again_at_once_is_another_request() -> None:
    """Its first life may still be on a worker's device."""
    for seed in range(10):
        clients = Clients(seed, requests=4)
        start(clients, prefill=1, decode=1)
        cluster = clients.cluster

        def again(request_id: str, clients: Clients = clients) -> None:
            call = clients.calls[request_id]
            if call.ended is None and request_id in clients.cluster.core.requests:
                clients.abort(request_id)
                clients.calls[request_id] = Call(spec=call.spec, cut={})
                clients.submit(request_id, 1e-6)

        for moment in range(12):
            request_id = clients.rng.choice(list(clients.calls))
            cluster.after(f"again {moment}", lambda r=request_id, a=again: a(r), 1.0)
        assert clients.finish() == {"done": 4}
