"""What became of each simulated request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sim.trace import TraceRequest


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one request; `refused` and `failed` are reasons. `resubmitted_s`: the last
    time that it came back."""

    request: TraceRequest
    resubmitted_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    tokens: int = 0
    done: bool = False
    cached_tokens: int = 0
    prefilled_locally: bool = False
    refusals: int = 0
    retries: int = 0
    refused: str = ""
    failed: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Since it was last submitted: what it waited before, it was told to."""
        if self.first_token_s is None:
            return None
        since_s = self.resubmitted_s
        return self.first_token_s - (self.request.arrival_s if since_s is None else since_s)

    @property
    def e2e_s(self) -> float | None:
        """Of one that is done."""
        if not self.done or self.last_token_s is None:
            return None
        return self.last_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """The mean per token after the first; None without any."""
        if not self.done or self.first_token_s is None or self.last_token_s is None:
            return None
        if self.tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)
