"""What the fate of requests teaches: how far predictions were off, how long outputs are, whether a
tier keeps its objectives. Pure; part of a router's core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from kvrelay.messages import Tokens
from kvrelay.types import FinishReason
from router.candidate import PromptPrediction
from router.forecast.forecast import Forecast, messages_s
from router.ladder import Ladders
from router.latency.output_lengths import OutputLengths
from router.request import Request
from router.workers import Workers

TOO_LATE = 1.1
"""Of its time, is what a first token that came too late is taken to have needed at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    workers: Workers
    lengths: OutputLengths
    ladders: Ladders
    forecast: Forecast

    def reserved(self, request: Request, now_s: float) -> None:
        """Its decode worker has taken it."""
        request.reserved_s = now_s
        if request.placed is not None and request.placed.candidate.prefill is not None:
            request.placed.candidate.decode.reserving.observe(now_s - request.placed_s)

    def _dispatched(self, request: Request, now_s: float) -> None:
        """Its first token has come. What its prompt took beside its own time, where it had none to
        wait for."""
        if request.predicted is None or request.placed is None:
            return
        prompt, candidate = request.predicted.prompt, request.placed.candidate
        if prompt.queue_s <= 0 and isfinite(prompt.prefill_s):
            first_s = request.placed_s + _at_most_due_s(request, prompt.first_token_s, now_s)
            sent_s = request.placed_s if candidate.prefill is None else request.reserved_s
            computed_s = prompt.pull_s + prompt.prefill_s
            candidate.prefiller.dispatching.observe(first_s - sent_s - computed_s)

    @staticmethod
    def _as_known_now(request: Request, prompt: PromptPrediction) -> PromptPrediction:
        """With the delays of its workers' messages that it has shown itself: they are not to count
        as errors too."""
        if request.placed is None or prompt.queue_s > 0:
            return prompt
        return replace(prompt, messages_s=messages_s(request.placed.candidate))

    def begun(self, request: Request, now_s: float) -> None:
        """Its first token has come, before anyone has counted it."""
        if any(choice.next_index for choice in request.choices):
            return
        if request.submitted.objectives.ttft_s is None:  # it is held to its tier's objective
            age_s = request.ledger.age_s(now_s)
            begun_s = now_s - age_s
            self.ladders.saw_ttft(request.tier.name, age_s, begun_s=begun_s, now_s=now_s)
        predicted = request.predicted
        if predicted is not None and not request.disturbed:
            self._dispatched(request, now_s)
            predicted_s = self._as_known_now(request, predicted.prompt).first_token_s
            self.forecast.ttft.observe(
                predicted_s,
                _at_most_due_s(request, predicted_s, now_s),
                now_s,
                undisturbed=predicted.prompt.queue_s <= 0,
            )

    def choice_grown(self, request: Request, event: Tokens) -> None:
        if event.finish_reason is not None and request.sampling.max_tokens:
            tokens = request.choices[event.choice].next_index
            was_cut = event.finish_reason is not FinishReason.STOP
            self.lengths.observe(request.tier.name, tokens, was_cut=was_cut)

    def ended(self, request: Request, now_s: float) -> None:
        """Its last token has come. That it stood back for others was not for want of speed."""
        actual_s = request.tpot_s()
        if actual_s is None:
            return
        if request.submitted.objectives.tpot_s is None:
            begun_s = now_s - request.ledger.age_s(now_s)
            self.ladders.saw_tpot(request.tier.name, actual_s, begun_s=begun_s, now_s=now_s)
        paced_s = request.tpot_s(less_s=request.stood_back_s)
        expected_s = self._expected_tpot_s(request)
        if expected_s is not None and paced_s is not None:
            self.forecast.tpot.observe(expected_s, paced_s, now_s, undisturbed=False)

    def _expected_tpot_s(self, request: Request) -> float | None:
        """Beside the longest steps that it was to have with those admitted after it."""
        predicted, placement = request.predicted, request.placement
        if predicted is None or placement is None:
            return None
        worker = self.workers.get(placement.decode)
        worst_s = 0.0 if worker is None else worker.peaks.since(request.placed_s)
        return max(0.0, worst_s - predicted.decode.step_s) + predicted.tpot_s


def _at_most_due_s(request: Request, predicted_s: float, now_s: float) -> float:
    """From its placing to its first token. One that came too late went behind all that could still
    be in time: how late it was then says nothing of the prediction."""
    took_s, objective_s = now_s - request.placed_s, request.objectives.ttft_s
    if objective_s is None:
        return took_s
    waited_s = request.ledger.age_s(now_s) - took_s
    return min(took_s, TOO_LATE * max(objective_s - waited_s, predicted_s))
