"""Which workers serve a request. Pure: a policy is a function over what workers last said."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvrelay.messages import Counters, WorkerHello
from kvrelay.types import Incarnation, RequestKey, RequestSpec, Role


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """The router's soft view of a worker: its last counters, and what this router has sent it."""

    hello: WorkerHello
    counters: Counters = field(default_factory=Counters)
    sequences: dict[RequestKey, int] = field(default_factory=dict)  # on the decode side
    prompt_tokens: dict[RequestKey, int] = field(default_factory=dict)  # not yet prefilled

    @property
    def incarnation(self) -> Incarnation:
        return self.hello.incarnation

    @property
    def decode_load(self) -> float:
        """Share of the batch that is taken."""
        own = sum(self.sequences.values())
        return max(own, self.counters.running) / self.hello.max_running_requests

    @property
    def prefill_load(self) -> int:
        """Prompt tokens ahead of a new request."""
        return max(sum(self.prompt_tokens.values()), self.counters.prefill_waiting_tokens)

    def forget(self, key: RequestKey) -> None:
        self.sequences.pop(key, None)
        self.prompt_tokens.pop(key, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` None: the decode worker (of role both) prefills too."""

    decode: Incarnation
    prefill: Incarnation | None


def fits(spec: RequestSpec, worker: WorkerView) -> bool:
    """Whether the worker could serve it when idle."""
    tokens = len(spec.prompt_ids) + spec.sampling.max_tokens
    wide = spec.sampling.n <= worker.hello.max_running_requests
    return wide and tokens <= worker.hello.max_model_len


def least_loaded(
    spec: RequestSpec, workers: Iterable[WorkerView], *, tried: Collection[Incarnation]
) -> Placement | None:
    """The emptiest decode worker not tried yet, with the prefill worker of the shortest queue."""
    usable = [w for w in workers if fits(spec, w) and w.incarnation not in tried]
    prefills = [w for w in usable if w.hello.role is Role.PREFILL]
    decodes = [w for w in usable if w.hello.role is Role.BOTH]
    if prefills:
        decodes += [w for w in usable if w.hello.role is Role.DECODE]
    if not decodes:
        return None
    decode = min(decodes, key=lambda w: w.decode_load)
    if decode.hello.role is Role.BOTH:
        return Placement(decode=decode.incarnation, prefill=None)
    prefill = min(prefills, key=lambda w: w.prefill_load)
    return Placement(decode=decode.incarnation, prefill=prefill.incarnation)
