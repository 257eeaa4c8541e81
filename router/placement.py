"""Which workers serve a request. Pure: a policy is a function over what workers last said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
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


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers between which KV is handed over."""

    prefill: Incarnation
    decode: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` None: the decode worker (of role both) prefills too."""

    decode: Incarnation
    prefill: Incarnation | None

    @property
    def pair(self) -> Pair | None:
        return None if self.prefill is None else Pair(self.prefill, self.decode)


Objections = Callable[[Pair | None], tuple[int, float]]
"""How much speaks against a pair (0: nothing), and what decides among equals: the least is best."""


def trusted(_: Pair | None) -> tuple[int, float]:
    return (0, 0.0)


def fits(spec: RequestSpec, worker: WorkerView) -> bool:
    """Whether the worker could serve it when idle."""
    tokens = len(spec.prompt_ids) + spec.sampling.max_tokens
    wide = spec.sampling.n <= worker.hello.max_running_requests
    return wide and tokens <= worker.hello.max_model_len


def least_loaded(
    spec: RequestSpec,
    workers: Iterable[WorkerView],
    *,
    tried: Collection[Incarnation],
    objections: Objections = trusted,
) -> Placement | None:
    """The emptiest decode worker not tried yet, with the prefill worker of the shortest queue, of
    those pairs that least speaks against; a tried worker's count among these too."""
    fitting = [worker for worker in workers if fits(spec, worker)]
    least: int | None = None
    best: tuple[tuple[int, float], Placement] | None = None
    for placement in _by_load(fitting):
        against = objections(placement.pair)
        least = against[0] if least is None else min(least, against[0])
        if placement.decode not in tried and (best is None or against < best[0]):
            best = (against, placement)
        if best is not None and best[0] == (0, 0.0):
            break
    return best[1] if best is not None and best[0][0] == least else None


def _by_load(workers: Iterable[WorkerView]) -> Iterator[Placement]:
    """The emptiest decode workers first, for each the shortest prefill queues first."""
    ordered = sorted(workers, key=lambda w: w.prefill_load)
    prefills = [w.incarnation for w in ordered if w.hello.role is Role.PREFILL]
    decodes = [w for w in workers if w.hello.role is not Role.PREFILL]
    for worker in sorted(decodes, key=lambda w: w.decode_load):
        alone = worker.hello.role is Role.BOTH
        for prefill in (None,) if alone else prefills:
            yield Placement(decode=worker.incarnation, prefill=prefill)
