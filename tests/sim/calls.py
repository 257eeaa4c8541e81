"""One request as its client sees it, and as the face of a router does that serves it.

The client is kvrelay's own: what it has so far decides when and how it goes on at another router.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvrelay.client.going_on import SoFar
from kvrelay.client.requests import generate_request
from kvrelay.errors import KvrelayError, Refused, RequestFailedError
from kvrelay.types import NO_OBJECTIVES, FinishReason, Objectives, RequestSpec
from kvrelay.v1 import inference_pb2 as pb
from router.carried.continuation import VALID_S, Ticket
from router.carried.signing import ClusterKey
from router.core.events import Aborted, ChoiceStopped, Deliver, Submitted
from router.core.promises.refusal import Refusal
from router.core.request import Request
from router.core.state.generation import ChoiceTokens, GenerationRequest
from router.grpc_api.messages import continuation_of
from tests.sim.model import NAMES, VOCABULARY, expected
from tests.sim.routers import RouterLife

if TYPE_CHECKING:
    from tests.sim.clients import Clients

MOST_REFUSALS = 50
TICKETS = ClusterKey(b"of the simulated cluster")
GONE = RequestFailedError("unavailable", "the router is gone")


@dataclass(slots=True, eq=False)
class Call:
    """What one client saw of one request. `cut` says after how many tokens a choice is stopped.
    `face` is at the router that it is connected to, `at` counts the routers that it was at."""

    spec: RequestSpec
    cut: dict[int, int]
    objectives: Objectives = NO_OBJECTIVES
    routers: int = 1
    at: int = 0
    face: Face | None = None
    refusals: int = 0
    resumed: int = 0
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    ended: str | None = None
    so_far: SoFar = field(init=False)
    request: pb.GenerateRequest = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.spec.sampling
        self.so_far = SoFar(routers=self.routers)
        self.request = generate_request(
            self.spec.prompt_ids,
            {
                "request_id": self.spec.key.request_id,
                "n": sampling.n,
                "max_tokens": sampling.max_tokens,
                "seed": sampling.seed,
                "stop_token_ids": sampling.stop_token_ids,
                "tier": self.spec.qos_tier,
                "tenant": self.spec.tenant,
            },
        )

    def gives_up(self, refusal: Refused) -> bool:
        """Without objectives every request is taken some time."""
        if self.objectives == NO_OBJECTIVES:
            return False
        return refusal.retry_after_s is None or self.refusals == MOST_REFUSALS

    def take(self, response: pb.GenerateResponse) -> None:
        choice = response.index
        assert choice not in self.reasons, "tokens after the last one"
        assert choice not in self.stopped, "tokens after a stop"
        self.tokens[choice] += response.token_ids
        if response.HasField("stop_string"):
            self.stopped.add(choice)
        elif response.finish_reason:
            self.reasons[choice] = FinishReason(response.finish_reason)
        self.so_far.add(response)

    def check(self) -> None:
        """A right beginning always, the whole when it ended well."""
        for choice in range(self.spec.sampling.n):
            right, reason = expected(self.spec, choice)
            got = self.tokens[choice]
            assert got == right[: len(got)], (self.spec.key, choice, got, right)
            if self.ended == "done" and choice not in self.stopped:
                assert (got, self.reasons[choice]) == (right, reason), self.spec.key

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """When to send it again, and as what; None: not."""
        if not self.so_far.has_begun:
            return error.retry_after_s if isinstance(error, Refused) else 0.25
        delay_s = self.so_far.delay_s(error, now_s)
        if delay_s is not None:
            self.so_far.go_on(self.request)
            self.resumed += 1
        return delay_s


@dataclass(slots=True, eq=False)
class Face:
    """A request at one router, and the connection to its client. `counts`: the tokens of each
    choice. `is_mute`: nothing comes from it any more."""

    clients: Clients
    call: Call
    router: RouterLife
    number: int
    request: Request | None = None
    admitted: bool = False
    has_begun: bool = False
    is_mute: bool = False
    counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    finished: set[int] = field(default_factory=set)

    @property
    def request_id(self) -> str:
        return self.call.spec.key.request_id

    @property
    def runs(self) -> bool:
        return self.clients.faces[self.router].get(self.request_id) is self

    # --- from its client ------------------------------------------------------------------------

    def up(self, action: Callable[[], None], scale_s: float = 0.01) -> None:
        life = self.router.incarnation
        self.clients.cluster.by(life, f"up {self.number}", action, scale_s)

    def begin(self) -> None:
        """As the gRPC server and the text service do."""
        faces, now_s = self.clients.faces[self.router], self.clients.cluster.now_s
        model = self.router.core.state.workers.model()
        if model is None:
            self.end(Refused("no_capacity", "no worker has joined yet", retry_after_s=1.0))
            return
        asked = self._asked(now_s)
        before = faces.get(self.request_id)
        if before is not None and asked.admitted:
            before.hang_up()
        assert self.request_id not in faces, "it runs already"
        faces[self.request_id] = self
        self.counts |= {i: len(tokens) for i, tokens in enumerate(asked.delivered)}
        self.finished |= asked.finished
        self.router.handle(Submitted(request=asked))
        self.request = self.router.core.state.requests.get(self.request_id)

    def _asked(self, now_s: float) -> GenerationRequest:
        spec, message = self.call.spec, self.call.request
        asked = GenerationRequest(
            request_id=message.request_id,
            prompt_ids=spec.prompt_ids,
            sampling=replace(spec.sampling, max_tokens=message.sampling_params.max_tokens),
            tenant=message.tenant,
            qos_tier=message.tier,
            objectives=self.call.objectives,
        )
        behind = continuation_of(message)
        if behind is None:
            return asked
        behind.check(asked.sampling.n, asked.sampling.max_tokens, VOCABULARY)
        ticket = TICKETS.open(Ticket, behind.ticket)
        assert ticket is not None and ticket.admits(self._ticket(now_s))
        return replace(
            asked,
            delivered=tuple([one.token_ids for one in behind.choices]),
            finished=frozenset(i for i, one in enumerate(behind.choices) if one.finished),
            admitted=True,
        )

    def _ticket(self, until_s: float) -> Ticket:
        spec = self.call.spec
        return Ticket.of(
            self.request_id, spec.prompt_ids, spec.qos_tier, NAMES.fingerprint, until_s=until_s
        )

    def hang_up(self) -> None:
        if self.runs:
            del self.clients.faces[self.router][self.request_id]
            self.router.handle(Aborted(request_id=self.request_id))

    # --- to its client --------------------------------------------------------------------------

    def down(self, action: Callable[[], None], scale_s: float = 0.01) -> None:
        """Unless the client is at another router by then."""

        def arrive() -> None:
            if self.call.face is self and not self.is_mute:
                action()

        self.clients.cluster.after(f"down {self.number}", arrive, scale_s)

    def refuse(self, refusal: Refusal) -> None:
        assert not self.admitted, refusal
        retry_after_s = refusal.retry_after_s
        self.end(Refused(refusal.reason, refusal.message, retry_after_s=retry_after_s))

    def end(self, error: KvrelayError | None = None) -> None:
        self.clients.faces[self.router].pop(self.request_id, None)
        self.down(lambda: self.clients.over(self.call, error))

    def deliver(self, delivery: Deliver) -> None:
        assert self.admitted
        for piece in delivery.tokens:
            if piece.choice not in self.finished:
                self._send(piece)
        if delivery.done:
            self.end()
        else:
            life = self.router.incarnation
            self.clients.cluster.by(life, f"text {self.number}", self._stop)

    def _send(self, piece: ChoiceTokens) -> None:
        self.counts[piece.choice] += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finished.add(piece.choice)
        self._respond(piece.choice, piece.token_ids, piece.finish_reason or "")

    def _respond(self, choice: int, token_ids: Sequence[int], reason: str, stop: str = "") -> None:
        response = pb.GenerateResponse(
            index=choice,
            token_ids=token_ids,
            finish_reason=reason,
            seed=self.call.spec.sampling.seed,
        )
        if stop:
            response.stop_string = stop
        if not self.has_begun:
            until_s = self.clients.cluster.now_s + VALID_S
            response.ticket = TICKETS.sign(self._ticket(until_s))
            self.has_begun = True
        self.down(lambda: self.call.take(response))

    def _stop(self) -> None:
        """A stop string has ended a choice."""
        for choice, after in self.call.cut.items():
            if self.runs and self.counts[choice] >= after and choice not in self.finished:
                self.finished.add(choice)
                self._respond(choice, (), FinishReason.STOP, "stop")
                stop = ChoiceStopped(request_id=self.request_id, choice=choice, valid_tokens=after)
                self.router.handle(stop)
                if self.request_id not in self.router.core.state.requests:
                    self.end()
