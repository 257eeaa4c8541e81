"""When a choice is over. Pure; the same rule on both workers."""

from __future__ import annotations

from kvrelay.types import FinishReason, Sampling


def finish_reason(sampling: Sampling, *, token_id: int, emitted: int) -> FinishReason | None:
    """After `token_id` became the `emitted`-th token of its choice (1-based); None: go on.

    Stop ids can't be drawn before `min_tokens` (the sampler masks them).
    """
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if emitted >= sampling.max_tokens else None


def needs_history(sampling: Sampling) -> bool:
    """Whether the sampler must see the earlier tokens."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
