"""What was predicted of a request, beside what it really took. Pure."""

from __future__ import annotations

from typing import Protocol

from router.ledger import Ledger


class Predicted(Protocol):
    """From when the face received it to the first token, and for each token after it."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float: ...


def prediction_errors(predicted: Predicted, ledger: Ledger, tokens: int) -> dict[str, float]:
    """# ttft, tpot |-> predicted by actual seconds, of those that are known

    `tokens` are those of the longest choice.
    """
    first_s, last_s = ledger.after_s("first_token_received"), ledger.after_s("last_token_received")
    ratios: dict[str, float] = {}
    if first_s:
        ratios["ttft"] = predicted.ttft_s / (ledger.before_submission_s + first_s)
    if first_s and last_s and tokens > 1 and last_s > first_s:
        ratios["tpot"] = predicted.tpot_s * (tokens - 1) / (last_s - first_s)
    return ratios
