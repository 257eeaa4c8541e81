"""The clients of a simulated cluster: what each saw of its request, and whether that was right."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kvpool.core.transfer.messages import HandoffMode
from kvpool.core.transfer.slabs import SlabState
from kvrelay.types import NO_OBJECTIVES, FinishReason, Objectives, RequestSpec
from router.core.events import (
    Aborted,
    Admit,
    ChoiceStopped,
    Command,
    Deliver,
    Fail,
    Refuse,
    Submitted,
)
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.promises.refusal import Refusal
from router.core.state.generation import ChoiceTokens, GenerationRequest
from tests.sim.cluster import Cluster
from tests.sim.model import expected, make_spec
from tests.sim.waits import who_waits

MOST_REFUSALS = 50


@dataclass(slots=True)
class Call:
    """What one client saw of one request. `cut` says after how many tokens it stops a choice."""

    spec: RequestSpec
    cut: dict[int, int]
    objectives: Objectives = NO_OBJECTIVES
    refusals: int = 0
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    admitted: bool = False
    ended: str | None = None

    def gives_up(self, refusal: Refusal) -> bool:
        """Without objectives every request is taken some time."""
        if self.objectives == NO_OBJECTIVES:
            return False
        return refusal.retry_after_s is None or self.refusals == MOST_REFUSALS

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
    def __init__(
        self,
        seed: int,
        requests: int,
        mode: HandoffMode = HandoffMode.PUSH,
        policies: Policies = DEFAULT_POLICIES,
    ) -> None:
        self.mode = mode
        self.rng = random.Random(seed)
        self.cluster = Cluster(seed, self.hear, policies)
        self.calls: dict[str, Call] = {}
        for number in range(requests):
            self.add(make_spec(self.rng, number), 2)

    def add(
        self,
        spec: RequestSpec,
        longest_delay_s: float,
        objectives: Objectives = NO_OBJECTIVES,
    ) -> None:
        wanted = range(spec.sampling.n)
        cut = {c: self.rng.randint(1, 6) for c in wanted if self.rng.random() < 0.2}
        self.calls[spec.key.request_id] = Call(spec=spec, cut=cut, objectives=objectives)
        self.submit(spec.key.request_id, self.rng.uniform(0, longest_delay_s))

    def submit(self, request_id: str, delay_s: float) -> None:
        call = self.calls[request_id]
        spec = call.spec
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=spec.prompt_ids,
            sampling=spec.sampling,
            tenant=spec.tenant,
            qos_tier=spec.qos_tier,
            objectives=call.objectives,
        )
        event = Submitted(request=request)
        self.cluster.after(f"client {request_id}", lambda: self.cluster.to_router(event), delay_s)

    def abort(self, request_id: str) -> None:
        call = self.calls[request_id]
        if call.ended is None and request_id in self.cluster.core.state.requests:
            call.ended = "aborted"
            self.cluster.to_router(Aborted(request_id=request_id))

    def hear(self, command: Command) -> None:
        call = self.calls[command.request_id]
        assert call.ended is None, f"{command} after {call.ended}"
        match command:
            case Admit():
                assert not call.admitted
                call.admitted = True
            case Refuse(request_id=request_id, refusal=refusal):
                assert not call.admitted
                call.refusals += 1
                if call.gives_up(refusal):
                    call.ended = f"refused: {refusal.reason}"
                else:
                    assert refusal.retry_after_s is not None, refusal
                    self.submit(request_id, refusal.retry_after_s)
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
                if request_id not in self.cluster.core.state.requests:
                    call.ended = "done"

    def finish(self) -> Counter[str]:
        """Run to the end and check all that must hold then; how the requests ended."""
        self.cluster.run()
        self.cluster.settle()
        assert not self.cluster.core.state.requests, who_waits(self.cluster)
        for call in self.calls.values():
            assert call.ended is not None, f"{call.spec.key} never ended"
            call.check()
        for view in self.cluster.core.state.workers.values():
            assert view.outlook.sequences == len(view.queue) == 0, view
        assert_nothing_held(self.cluster)
        return Counter(call.ended or "" for call in self.calls.values())


def assert_nothing_held(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.core.validate()
        assert not worker.held(), worker.held()
        pinned = {b for held in worker.tables.held() for b in held.tables[0]}
        assert worker.tables.device.available(0) + len(pinned) == worker.tables.blocks
        assert worker.pool is None or worker.pool.stores.idle, worker.incarnation
        slabs = worker.decode.reservations.slabs
        assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(cluster.now_s)
        assert worker.decode.sequences == 0
        assert worker.prefill.jobs.handing_over == len(worker.prefill.queue) == 0
        assert worker.core.idle
    for host in cluster.pools.hosts.values():
        assert host.node is not None
        counts = host.node.core.books.counts()
        states = ("granted", "fenced", "loading", "disk_waiting")
        assert not any(counts[state] for state in states), counts
        assert host.node.core.idle
