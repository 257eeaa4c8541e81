"""What a stream has delivered, so that it can go on at another router when its own is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import KvrelayError, Refused
from kvrelay.requests import is_gone
from kvrelay.v1 import inference_pb2 as pb

RECONNECT_FOR_S = 10.0
"""Without any router for so long, a stream is lost. A router that was killed is back before."""
RECONNECT_EVERY_S = 0.25


@dataclass(slots=True, kw_only=True)
class SoFar:
    """`routers` are how many may be asked. `has_begun`: something was delivered."""

    routers: int
    has_begun: bool = False
    _answer: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    _ticket: bytes = b""
    _choices: dict[int, pb.Delivered] = field(default_factory=dict)
    _losses: int = 0  # since something was delivered
    _lost_s: float = 0.0

    def add(self, response: pb.GenerateResponse) -> None:
        self.has_begun, self._losses = True, 0
        self._ticket = self._ticket or response.ticket
        self._answer = response
        choice = self._choices.setdefault(response.index, pb.Delivered())
        choice.token_ids.extend(response.token_ids)
        choice.finished |= bool(response.finish_reason)

    def is_whole(self, request: pb.GenerateRequest) -> bool:
        """All choices have ended."""
        finished = sum(choice.finished for choice in self._choices.values())
        return finished == _choices_of(request)

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """When to ask the next router; None: not, since another one would say the same, or all have
        been gone for long. A router that has just started knows no worker yet, and refuses."""
        is_refused = isinstance(error, Refused) and error.retry_after_s is not None
        if not (is_refused or is_gone(error)):
            return None
        if not self._losses:
            self._lost_s = now_s
        self._losses += 1
        if self._losses < self.routers:
            return 0.0
        return RECONNECT_EVERY_S if now_s - self._lost_s < RECONNECT_FOR_S else None

    def go_on(self, request: pb.GenerateRequest) -> None:
        """The request becomes one that goes on behind all that was delivered."""
        asked, answer = request.sampling_params, self._answer
        asked.seed = answer.seed
        asked.ClearField("prompt_logprobs")
        if answer.HasField("capped_tokens"):
            asked.max_tokens = answer.capped_tokens
        choices = [self._choices.get(i, pb.Delivered()) for i in range(_choices_of(request))]
        request.continuation.CopyFrom(pb.Continuation(choices=choices, ticket=self._ticket))


def _choices_of(request: pb.GenerateRequest) -> int:
    asked = request.sampling_params
    return asked.n if asked.HasField("n") else 1
