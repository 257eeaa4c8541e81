"""A router's soft view of one worker. Pure.

A worker measures its speed when it starts, and corrects that by what it runs. If it was measured
on a busy machine, no request with objectives would be sent there, so it would never learn better.
So once in a while an idle worker is probed with a request for which it says it is too slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median_low

from engine.core.step_times import NotCovered, StepWork
from kvpool.core.layout.block_names import NamedFormat
from kvrelay.counters import Counters, LinkState
from kvrelay.errors import PeerError
from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, RequestKey, Role
from router.core.load.decode_outlook import DecodeOutlook, StepPeaks
from router.core.load.prefill_queue import PrefillQueue
from router.core.load.step_times import NoTimes, ToldTimes, WorkerTimes

BELIEVED = 4.0
"""It may be this many times as fast as it says, no more."""
FIRST_S, LONGEST_S = 5.0, 300.0
"""Between two trials: twice as long each time."""


@dataclass(slots=True)
class Doubt:
    _again_s: float = FIRST_S
    _pause_s: float = FIRST_S

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._again_s

    def tried(self, now_s: float) -> None:
        self._again_s = now_s + self._pause_s
        self._pause_s = min(LONGEST_S, 2 * self._pause_s)


def check_joins(hello: WorkerHello, others: Iterable[WorkerHello]) -> None:
    """Raises PeerError, saying what differs and what to do."""
    for other in others:
        if other.fingerprint != hello.fingerprint:
            raise PeerError(
                f"worker {hello.name} serves another model than {other.name} "
                f"(fingerprint {hello.fingerprint}, not {other.fingerprint})"
            )
        if {hello.role, other.role} == {Role.PREFILL, Role.DECODE}:
            _check_formats(hello, other)


def _check_formats(hello: WorkerHello, other: WorkerHello) -> None:
    """KV would be handed over between these two."""
    ours, theirs = (NamedFormat.of(one.physical_format) for one in (hello, other))
    if ours.dtype != theirs.dtype and not (ours.mixed_precision and theirs.mixed_precision):
        raise PeerError(
            f"worker {hello.name} has KV in {ours.dtype}, {other.name} in {theirs.dtype}: give "
            "both the same dtype, or set transfer.allow_mixed_precision: true on both to have it "
            "converted"
        )


_LATEST, _MOMENT_S = 9, 0.25


@dataclass(slots=True)
class Delay:
    """How long it usually takes until a message to a worker has an effect: the median of the latest
    moments, so that one outlier does not count, however many requests it held up. Of those of one
    moment the soonest counts. 0 before any was seen."""

    usual_s: float = 0.0
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    _moment_s: float = -inf

    def observe(self, seconds: float, now_s: float) -> None:
        seconds = max(0.0, seconds)
        if now_s - self._moment_s < _MOMENT_S:
            self._latest[-1] = min(self._latest[-1], seconds)
        else:
            self._latest.append(seconds)
            self._moment_s = now_s
        self.usual_s = median_low(self._latest)


_KILO = 1024
_NEW_SHARE = 0.05
NOTHING_TOLD = Counters()


@dataclass(frozen=True, slots=True)
class Speed:
    """A worker's times as lines through the origin, for a first look: seconds per token of a
    prompt, and of a decode step with all places taken."""

    prompt_token_s: float
    full_step_s: float


Naming = tuple[str, str, int | None, int]
"""What the names of a worker's blocks depend on."""


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """Its last counters, and what this router has sent it: prompts not yet prefilled (`queue`) and
    sequences on its decode side (`outlook`), with what was predicted of their steps (`peaks`)."""

    hello: WorkerHello
    counters: Counters = NOTHING_TOLD
    times: ToldTimes = field(default_factory=NoTimes)
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    outlook: DecodeOutlook = field(default_factory=DecodeOutlook)
    peaks: StepPeaks = field(default_factory=StepPeaks)
    doubt: Doubt = field(default_factory=Doubt)
    reserving: Delay = field(default_factory=Delay)  # from asking it to its answer
    dispatching: Delay = field(default_factory=Delay)  # what prompts take beside their computing
    own_usually: float = 0.0  # sequences here, lately: from this router
    all_usually: float = 0.0  # and from all
    draining: bool = False
    led_away_s: float = -inf  # when it was last looked at what it holds up, while it drains
    suspect: bool = False  # silent for a while: nothing new is placed here if others can take it
    unreleased: set[RequestKey] = field(default_factory=set)
    """Attempts that have ended here, and hold a slot or a queue entry until the worker says
    Released."""
    incarnation: Incarnation = field(init=False)
    own_role: Role = field(init=False)  # as the worker told, last in this epoch
    role_epoch: int = field(init=False)
    chunk_tokens: int = field(init=False)  # prompt tokens of a step, in its own role
    role: Role = field(init=False)  # in effect: its own, or both
    prefills: bool = field(init=False)  # and does nothing else
    naming: Naming = field(init=False)
    _speed: tuple[ToldTimes, Speed] | None = None
    _links: dict[Incarnation, LinkState] = field(default_factory=dict)
    _linked: tuple[LinkState, ...] = ()
    _slowest: float | None = None

    def __post_init__(self) -> None:
        hello = self.hello
        names = (hello.fingerprint, hello.physical_format, hello.rope_border_tokens)
        self.naming = (*names, hello.block_size)
        self.incarnation = hello.incarnation
        self.take_role(hello.role, 0)
        self.serve_as(hello.role)

    @staticmethod
    def of(hello: WorkerHello) -> WorkerView:
        return WorkerView(hello=hello, times=WorkerTimes.of(hello))

    def serve_as(self, role: Role) -> None:
        self.role = role
        self.prefills = role is Role.PREFILL

    def take_role(self, role: Role, epoch: int) -> None:
        """As the worker tells. On a decode worker running requests wait for a prompt's step."""
        hello, self.own_role, self.role_epoch = self.hello, role, epoch
        is_decode = role is Role.DECODE
        self.chunk_tokens = hello.mixed_chunk_tokens if is_decode else hello.prefill_chunk_tokens

    def said(self, counters: Counters) -> None:
        first = self.counters is NOTHING_TOLD
        self.counters = counters
        self.suspect = False
        self.draining |= counters.draining
        own, share = self.outlook.sequences, 1.0 if first else _NEW_SHARE
        self.own_usually += share * (own - self.own_usually)
        self.all_usually += share * (max(own, counters.running) - self.all_usually)
        if isinstance(self.times, WorkerTimes):
            self.times = self.times.corrected(counters)

    def step_s(self, work: StepWork) -> float:
        """Infinite for what the worker's times don't cover."""
        try:
            return self.times.step_s(work)
        except NotCovered:
            return inf

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        """A chunk of one prompt."""
        try:
            return self.times.prefill_s(new_tokens, context_tokens)
        except NotCovered:
            return inf

    def prompt_s(self, tokens: int, cached: int) -> float:
        """What is not `cached` of a prompt, chunk by chunk."""
        try:
            return self.times.prompt_s(tokens, cached, self.chunk_tokens)
        except NotCovered:
            return inf

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        try:
            return self.times.decode_s(sequences, kv_tokens)
        except NotCovered:
            return inf

    @property
    def speed(self) -> Speed:
        known = self._speed
        if known is None or known[0] is not self.times:
            known = self._speed = (self.times, self._look_at_times())
        return known[1]

    def _look_at_times(self) -> Speed:
        """What isn't covered counts for nothing: a closer look tells."""
        prompt_s = self.prefill_s(_KILO, 0)
        step_s = self.decode_s(self.hello.max_running_requests, 0)
        return Speed(
            prompt_s / _KILO if prompt_s < inf else 0.0,
            step_s if step_s < inf else 0.0,
        )

    def link(self, peer: Incarnation) -> LinkState | None:
        """The one that the worker has opened to `peer`."""
        if self._linked is not self.counters.links:
            self._linked = self.counters.links
            self._links = {link.peer: link for link in self._linked}
            speeds = (link.bytes_per_s for link in self._linked if link.bytes_per_s)
            self._slowest = min(speeds, default=None)
        return self._links.get(peer)

    @property
    def slowest_bytes_per_s(self) -> float | None:
        """Of the links that were measured, as of the last `link`."""
        return self._slowest

    @property
    def is_idle(self) -> bool:
        sequences = self.outlook.sequences or self.counters.running
        return not (sequences or self.queue or self.counters.prefill_waiting_tokens)

    @property
    def decode_load(self) -> float:
        """Share of the batch that is taken."""
        sequences, running = self.outlook.sequences, self.counters.running
        return (sequences if sequences > running else running) / self.hello.max_running_requests

    @property
    def prefill_load(self) -> int:
        """Prompt tokens ahead of a new request."""
        return max(self.queue.tokens, self.counters.prefill_waiting_tokens)

    @property
    def free_places(self) -> int:
        """As far as is known: other routers ask too."""
        sequences, running = self.outlook.sequences, self.counters.running
        return self.hello.max_running_requests - (sequences if sequences > running else running)

    def held(self, tier: str) -> int:
        """Its sequences, here or on their way; those of other routers as the worker told."""
        told = (load.running for load in self.counters.tiers if load.tier == tier)
        return max(self.outlook.of_tier[tier], *told, 0)

    def give_back(self, key: RequestKey, now_s: float) -> None:
        """The worker holds nothing of it any more."""
        self.outlook.remove(key)
        self.queue.remove(key, now_s)
        self.unreleased.discard(key)

    def await_release(self, key: RequestKey) -> None:
        """The attempt has ended; what it holds here is given back by Released."""
        if key in self.outlook or key in self.queue:
            self.unreleased.add(key)
