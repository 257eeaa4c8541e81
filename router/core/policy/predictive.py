"""Two-sided early rejection by prediction: a request is taken if it will keep its objectives, and
breaks nobody's, at the time when it gets to each worker. Pure.

A worker that nobody uses takes what is predicted to keep its objectives there, whatever the margins
of predictions say: else nothing more would be learnt of them, and all be refused for ever.

So does one that says it is too slow, once in a while (`router.core.state.worker_view`).

Otherwise it is refused at once, with the reason and the time when the same would be taken: when the
queue has become short enough, or enough sequences have ended, what is promised to others included.

What is its tier's own at a decode worker a request gets whoever is there (`admission`): only
those that are on their own places themselves count against its pace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvrelay.errors import RefusalReason
from kvrelay.types import Incarnation
from router.core.load.decode_outlook import BatchThen
from router.core.policy.admission import Admitted, Verdict, is_own, no_place, own_batch
from router.core.policy.forecast import Forecast, blocks_of, step_with
from router.core.promises.refusal import Refusal
from router.core.state.candidate import Candidate, Prediction
from router.core.state.demand import Demand
from router.core.state.worker_view import BELIEVED, WorkerView

MOST_ROOM = 0.75
"""Of the pace of a worker that nobody uses: what a long prompt is to leave free at most."""
LOOKED_AT = 16
"""Ways to serve a request; the first ones are the best."""
DECODE_REASONS = frozenset(
    {RefusalReason.SLOTS_EXHAUSTED, RefusalReason.TPOT_UNREACHABLE, RefusalReason.KV_EXHAUSTED}
)


class AdmissionObjection(NamedTuple):
    """Why a way can't be taken. `tell` says it in full, with the time to come back: it costs more
    than the question itself, and is asked of one way only."""

    reason: str
    tell: Callable[[], Refusal]


@dataclass(frozen=True, slots=True)
class Predictive:
    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        objections: list[AdmissionObjection] = []
        known = _KnownAnswers()
        for candidate in islice(candidates, LOOKED_AT):
            if candidate in known:
                continue
            prediction = forecast.predict(demand, candidate, now_s)
            look = _Look(demand, candidate, candidate.decode, prediction, forecast, now_s)
            objection = look.objection()
            doubted = objection is not None and look.is_doubtful()
            if objection is None or doubted:
                return Admitted(
                    candidate=candidate,
                    prediction=look.prediction,
                    doubted=doubted,
                    counted=look.counted,
                )
            objections.append(objection)
            known.add(candidate, objection.reason)
        return _told(objections) or otherwise


class _KnownAnswers:
    """A busy worker that was found to have no room, or no time, is not asked again with another
    partner."""

    def __init__(self) -> None:
        self._full: set[Incarnation] = set()
        self._late: set[tuple[Incarnation, bool]] = (
            set()
        )  # worker, and whether its steps are shared

    def __contains__(self, candidate: Candidate) -> bool:
        if candidate.decode.incarnation in self._full:
            return True
        return (candidate.prefiller.incarnation, candidate.prefill is None) in self._late

    def add(self, candidate: Candidate, reason: str) -> None:
        if reason in DECODE_REASONS and not candidate.decode.is_idle:
            self._full.add(candidate.decode.incarnation)
        prefiller = candidate.prefiller
        if reason == RefusalReason.TTFT_UNREACHABLE and not prefiller.is_idle:
            self._late.add((prefiller.incarnation, candidate.prefill is None))


def _told(objections: Iterable[AdmissionObjection]) -> Refusal | None:
    """What speaks against the best way, of those for which a time can be told. That it never could
    be taken is said only if no way ever could."""
    without_time: list[Refusal] = []
    for objection in objections:
        refusal = objection.tell()
        if refusal.retry_after_s is not None:
            return refusal
        without_time.append(refusal)
    return min(without_time, key=lambda refusal: refusal.hopeless, default=None)


@dataclass(frozen=True, slots=True)
class _Look:
    """At one way to serve a request: what speaks against it, and until when."""

    demand: Demand
    candidate: Candidate
    worker: WorkerView  # that decodes
    prediction: Prediction
    forecast: Forecast
    now_s: float

    @property
    def counted(self) -> int | None:
        """What of these will be there then, the worker doesn't know: only what is more."""
        if self.demand.objectives.tpot_s is None:
            return None
        return max(self.worker.outlook.sequences, self.worker.counters.running)

    def is_doubtful(self) -> bool:
        """Nothing speaks against it but what idle workers say of their speed, and how long messages
        to them took lately."""
        if not all(w.is_idle and w.doubt.is_due(self.now_s) for w in self.candidate.workers):
            return False
        messages_s = self.prediction.prompt.messages_s
        return self._slowest() > 1 and self._slowest(less_s=messages_s) <= BELIEVED

    def _slowest(self, less_s: float = 0.0) -> float:
        """By what it allows: the largest of its predicted times, each `less_s` shorter."""
        asked = self.demand.objectives
        times = (
            (self._alone_s - less_s, asked.ttft_s),
            (self.prediction.tpot_s, asked.tpot_s),
            (self.demand.waited_s + self.prediction.completes_in_s - less_s, asked.deadline_s),
        )
        return max((s / most for s, most in times if most is not None), default=0.0)

    @property
    def _alone_s(self) -> float:
        """To its first token, without a queue."""
        prompt = self.prediction.prompt
        alone_s = prompt.messages_s + prompt.pull_s + prompt.prefill_s
        return self.forecast.ttft.overhead_s + alone_s

    def objection(self) -> AdmissionObjection | None:
        return self.place() or self.ttft() or self.tpot() or self.deadline() or self.blocks()

    def _refusal(
        self, reason: str, message: str, retry_after_s: float | None, *, hopeless: bool = False
    ) -> Refusal:
        if retry_after_s is not None:
            retry_after_s = max(retry_after_s, self._line_s)
        return Refusal(
            reason=reason,
            message=message,
            retry_after_s=None if hopeless else retry_after_s,
            hopeless=hopeless,
            work=self.prediction.work,
            shares=self.prediction.shares,
        )

    @property
    def _line_s(self) -> float:
        """How long all that was promised takes at least: on the prefill side and in all places."""
        line, places = self.demand.line, self.worker.hello.max_running_requests
        prefills_s = line.prefill_s - self.demand.promised.prefill_s
        sequence_s = self.prediction.decode.step_s * self.demand.output_tokens
        return max(prefills_s, line.sequences * sequence_s / places)

    def place(self) -> AdmissionObjection | None:
        full = no_place(self.demand, self.worker)
        if full is None:
            return None

        def tell() -> Refusal:
            missing = self.demand.choices - self.worker.free_places
            return self._refusal(full.reason, full.message, self._ended_in_s(missing, self.now_s))

        return AdmissionObjection(full.reason, tell)

    def ttft(self) -> AdmissionObjection | None:
        """A queue shrinks by a second each second; the prompt's own time does not. What is only
        promised is no queue that a margin could be learnt from."""
        objective_s, prompt = self.demand.objectives.ttft_s, self.prediction.prompt
        alone_s = self._alone_s
        queued = prompt.queue_s > 0 and not self.candidate.prefiller.is_idle
        ttft_s = self.prediction.ttft_at_most_s if queued else self.prediction.ttft_s
        if objective_s is None or ttft_s <= objective_s:
            return None

        def tell() -> Refusal:
            growth = self.forecast.ttft.growth(prompt.first_token_s)
            over_s = min((ttft_s - objective_s) / growth, prompt.queue_s)
            in_line_s = self.demand.line.prefill_s - self.demand.promised.prefill_s
            return self._refusal(
                RefusalReason.TTFT_UNREACHABLE,
                f"its first token would take {ttft_s * 1e3:.0f} ms, "
                f"{alone_s * 1e3:.0f} ms without a queue; asked for {objective_s * 1e3:g} ms",
                over_s + max(0.0, in_line_s),
                hopeless=alone_s > objective_s,
            )

        return AdmissionObjection(RefusalReason.TTFT_UNREACHABLE, tell)

    def tpot(self) -> AdmissionObjection | None:
        """Its own objective, which its handoff counts to, and the strictest of those that decode
        there. What yields one token has no pace."""
        if not self.demand.decodes:
            return None
        if is_own(self.demand, self.worker):
            return self._own_tpot()
        pace = _Pace(self.demand, self.worker, self.prediction, self.forecast)
        over = pace.over(self.prediction.decode.batch)
        if over is None:
            return None

        def fits(batch: BatchThen) -> bool:
            return pace.over(batch) is None

        tpot_s, bound_s = over

        def tell() -> Refusal:
            own = bound_s == self.demand.objectives.tpot_s and not self.worker.queue
            hopeless = own and not fits(BatchThen(0, 0))
            return self._refusal(
                RefusalReason.TPOT_UNREACHABLE,
                f"a token would take {tpot_s * 1e3:.1f} ms, "
                f"more than {bound_s * 1e3:.1f} ms" + (" even alone" if hopeless else ""),
                None if hopeless else self._when(fits),
                hopeless=hopeless,
            )

        return AdmissionObjection(RefusalReason.TPOT_UNREACHABLE, tell)

    def _own_tpot(self) -> AdmissionObjection | None:
        objective_s = self.demand.objectives.tpot_s
        batch = own_batch(self.demand, self.worker)
        step_s = step_with(self.demand, batch, self.worker)
        if objective_s is None or step_s <= objective_s:
            return None

        def tell() -> Refusal:
            return self._refusal(
                RefusalReason.TPOT_UNREACHABLE,
                f"a token would take {step_s * 1e3:.1f} ms beside those on their own places, "
                f"more than {objective_s * 1e3:.1f} ms",
                None,
                hopeless=not batch.sequences,
            )

        return AdmissionObjection(RefusalReason.TPOT_UNREACHABLE, tell)

    def deadline(self) -> AdmissionObjection | None:
        """Until its last token."""
        deadline_s = self.demand.objectives.deadline_s
        in_s = self.demand.waited_s + self.prediction.completes_in_s
        if deadline_s is None or in_s <= deadline_s:
            return None

        def tell() -> Refusal:
            queue_s = self.prediction.prompt.queue_s
            return self._refusal(
                RefusalReason.DEADLINE_UNREACHABLE,
                f"it would be done in {_time(in_s)}, {_time(in_s - queue_s)} without a queue; "
                f"its deadline is {_time(deadline_s)} after it was received",
                in_s - deadline_s,
                hopeless=in_s - queue_s > deadline_s,
            )

        return AdmissionObjection(RefusalReason.DEADLINE_UNREACHABLE, tell)

    def blocks(self) -> AdmissionObjection | None:
        """An idle worker takes what fits it at all. Where nobody has asked for a pace, sequences
        that outgrow the memory take turns, and the worker's own answer is enough; so it is where
        the blocks of those on lent places can be had."""
        decode, worker = self.prediction.decode, self.worker
        if self.demand.is_prompt_only or not self._pace_counts or is_own(self.demand, worker):
            return None
        if decode.needed_blocks <= decode.free_blocks or not decode.batch.sequences:
            return None

        def fits(batch: BatchThen) -> bool:
            used = blocks_of(worker, batch.kv_tokens) + batch.sequences
            return used + decode.needed_blocks <= worker.hello.total_blocks

        def tell() -> Refusal:
            return self._refusal(
                RefusalReason.KV_EXHAUSTED,
                f"it needs {decode.needed_blocks} KV blocks, "
                f"and {max(0, decode.free_blocks)} will be free",
                self._when(fits),
            )

        return AdmissionObjection(RefusalReason.KV_EXHAUSTED, tell)

    @property
    def _pace_counts(self) -> bool:
        """A sequence that has to make room for others would break an objective."""
        asked = self.demand.objectives
        paces = (asked.tpot_s, asked.deadline_s, self.worker.outlook.strictest_tpot_s)
        return any(pace_s is not None for pace_s in paces)

    def _when(self, fits: Callable[[BatchThen], bool]) -> float | None:
        """In how many seconds so many sequences have ended that it fits in the batch; None: that
        it doesn't is not because of those."""
        decode, soon = self.prediction.decode, self.demand.promised
        sequences = decode.batch.sequences - round(soon.sequences)
        kv_tokens = decode.batch.kv_tokens - round(soon.kv_tokens)

        def fits_after(ended: int) -> bool:
            left = sequences - ended
            kept_tokens = round(kv_tokens * left / sequences) if sequences else 0
            return fits(BatchThen(left, kept_tokens))

        ended = fewest(fits_after, sequences)
        return None if ended is None else self._ended_in_s(ended, self.now_s + decode.joins_in_s)

    def _ended_in_s(self, ended: int, from_s: float) -> float:
        """Until so many have ended, and those of the line have come and gone: one after another, as
        often as sequences of this length end in such a batch."""
        decode, outlook = self.prediction.decode, self.worker.outlook
        gap_s = decode.step_s * self.demand.output_tokens / max(1, decode.batch.sequences)
        known_s = outlook.end_s(ended, from_s) if ended else from_s
        first_s = ended * gap_s if known_s is None else max(0.0, known_s - from_s)
        return first_s + self.demand.line.sequences * gap_s


class _Pace:
    """Of a decode worker, with the request."""

    def __init__(
        self, demand: Demand, worker: WorkerView, prediction: Prediction, forecast: Forecast
    ) -> None:
        self._worker, self._margin = worker, forecast.tpot
        self._places = worker.hello.max_running_requests
        self._choices, self._kv_tokens = demand.choices, demand.kv_tokens
        self._longer_tokens = forecast.prompts.longer_by(demand)
        paused_s = prediction.tpot_s - prediction.decode.step_s  # for each token
        asked = (demand.objectives.tpot_s, paused_s), (worker.outlook.strictest_tpot_s, 0.0)
        self._bounds = [(bound_s, more_s) for bound_s, more_s in asked if bound_s is not None]

    def over(self, batch: BatchThen) -> tuple[float, float] | None:
        """What a token takes beside this batch, and the objective that is broken by that."""
        step_s = self._step_s(batch.sequences, batch.kv_tokens)
        for bound_s, more_s in self._bounds:
            tpot_s = step_s + more_s
            if batch.sequences:
                tpot_s = self._margin.apply(tpot_s)
            if tpot_s > bound_s or tpot_s + self._room_s(batch, step_s, bound_s) > bound_s:
                return tpot_s, bound_s
        return None

    def _step_s(self, sequences: int, kv_tokens: int) -> float:
        """Beside these; the worker runs no more than its places."""
        sequences = min(sequences + self._choices, self._places)
        return self._worker.decode_s(sequences, kv_tokens + self._kv_tokens)

    def _room_s(self, batch: BatchThen, step_s: float, bound_s: float) -> float:
        """Of a step, what is to stay free beside one with a long prompt: several others would fit
        where it is. A worker that has three quarters of its pace left takes it."""
        if self._longer_tokens <= 0 or not batch.sequences:
            return 0.0
        without_s = self._worker.decode_s(min(batch.sequences, self._places), batch.kv_tokens)
        usual_kv_tokens = batch.kv_tokens - self._longer_tokens
        usual_s = self._step_s(batch.sequences, usual_kv_tokens) - without_s
        own_s = step_s - without_s
        factor = own_s / usual_s if usual_s > 0 else 1.0
        free_s = bound_s - self._step_s(0, 0)
        return max(0.0, min((factor**2 - 1) * own_s, MOST_ROOM * free_s))


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest of 0 to `most` for which it holds, if it holds for all larger ones; None: for
    none of them. Small ones are found soonest."""
    low, high = 0, 0
    while high < most and not holds(high):
        low, high = high + 1, min(most, 2 * high + 1)
    found = low + bisect_left(range(low, min(high, most) + 1), True, key=holds)
    return None if found > most else found


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
