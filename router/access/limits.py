"""How much one API key may ask for: requests and tokens a minute, and requests at once. Pure.

Each rate is a token bucket that holds one minute's allowance. Tokens of the prompt are paid before
a request is placed, generated ones when it ends. So the bucket may be in debt, which the next
requests wait for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import RefusalReason, Refused
from kvrelay.types import value

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0
"""Nobody knows when one of the key's own requests ends."""


@value
class Limits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


UNLIMITED = Limits()


@dataclass(slots=True)
class Allowance:
    """A token bucket of one minute; `per_minute` None: it is never empty."""

    per_minute: int | None
    level: float = field(init=False)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.level = float(self.per_minute or 0)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until there is `amount`, at most the whole bucket's."""
        if self.per_minute is None:
            return 0.0
        self._refill(now_s)
        lacking = min(amount, self.per_minute) - self.level
        return max(0.0, lacking * MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Into debt, where there is less. A negative amount is given back."""
        if self.per_minute is not None:
            self._refill(now_s)
            self.level = min(float(self.per_minute), self.level - amount)

    def change(self, per_minute: int | None, now_s: float) -> None:
        """What was used stays used."""
        self._refill(now_s)
        used = 0.0 if self.per_minute is None else self.per_minute - self.level
        self.per_minute, self.level = per_minute, (per_minute or 0) - used

    def _refill(self, now_s: float) -> None:
        full = float(self.per_minute or 0)
        since_s, self.at_s = max(0.0, now_s - self.at_s), now_s
        self.level = min(full, self.level + since_s * full / MINUTE_S)


class Meter:
    """What one key has used at one router, and what it may use."""

    def __init__(self, limits: Limits = UNLIMITED) -> None:
        self.limits = limits
        self.running = 0
        self._requests = Allowance(limits.requests_per_minute)
        self._tokens = Allowance(limits.tokens_per_minute)

    def change(self, limits: Limits, now_s: float) -> None:
        """What was used stays used."""
        self.limits = limits
        self._requests.change(limits.requests_per_minute, now_s)
        self._tokens.change(limits.tokens_per_minute, now_s)

    def take(self, requests: int, tokens: int, now_s: float) -> None:
        """Negative numbers are given back."""
        self._requests.take(requests, now_s)
        self._tokens.take(tokens, now_s)

    def check_running(self, allowances: int) -> None:
        most = self.limits.concurrent_requests
        if most is not None and self.running >= allowances * most:
            raise _refused(
                RefusalReason.KEY_CONCURRENCY,
                f"this API key may have {most} requests at once, and has {self.running}",
                CONCURRENCY_RETRY_S,
            )

    def check_requests(self, allowances: int, now_s: float) -> None:
        wait_s = self._requests.wait_s(1, now_s) - (allowances - 1) * MINUTE_S
        if wait_s > 0:
            raise _refused(
                RefusalReason.KEY_REQUESTS,
                f"this API key may send {self.limits.requests_per_minute} requests a minute",
                wait_s,
            )

    def check_tokens(self, tokens: int, allowances: int, now_s: float) -> None:
        """A prompt of more than a minute's tokens waits for the whole allowance."""
        wait_s = self._tokens.wait_s(tokens, now_s) - (allowances - 1) * MINUTE_S
        if wait_s > 0:
            most = self.limits.tokens_per_minute
            raise _refused(
                RefusalReason.KEY_TOKENS,
                f"this API key may use {most} tokens a minute, of prompts and answers together",
                wait_s,
            )


class Booking:
    """One request of a key: `begin`, then `pay` as its prompt becomes known, then `settle` or
    `cancel`, of which the first counts."""

    def __init__(self, meter: Meter) -> None:
        self.computed_tokens = 0
        """Of its prompt, before it was admitted: they are not given back."""
        self._meter = meter
        self._allowances = 1
        self._paid_tokens = 0
        self._runs = False
        self._ended = False

    def begin(self, now_s: float, *, goes_on: bool = False) -> None:
        """Raises Refused, and counts nothing. Does nothing if it has begun. A request that
        `goes_on` was admitted by another router: it is refused only where the key is behind by a
        further allowance."""
        if self._runs:
            return
        self._allowances = 2 if goes_on else 1
        self._meter.check_running(self._allowances)
        self._meter.check_requests(self._allowances, now_s)
        self._meter.check_tokens(1, self._allowances, now_s)
        self._meter.take(1, 0, now_s)
        self._meter.running += 1
        self._runs = True

    def pay(self, tokens: int, now_s: float) -> None:
        """Its prompt has so many tokens, as far as it is known. Raises Refused, and pays
        nothing."""
        due = tokens - self._paid_tokens
        if due > 0:
            self._meter.check_tokens(due, self._allowances, now_s)
            self._meter.take(0, due, now_s)
            self._paid_tokens = tokens

    def settle(self, generated_tokens: int, now_s: float) -> None:
        if self._end():
            self._meter.take(0, generated_tokens, now_s)

    def cancel(self, now_s: float) -> None:
        """It was not admitted."""
        if self._end():
            self._meter.take(-1, self.computed_tokens - self._paid_tokens, now_s)

    def _end(self) -> bool:
        ends = self._runs and not self._ended
        self._ended = True
        self._meter.running -= ends
        return ends


def _refused(reason: RefusalReason, message: str, retry_after_s: float) -> Refused:
    text = f"{message}: come back in {max(retry_after_s, 0.1):.1f} s"
    return Refused(reason, text, retry_after_s=retry_after_s)
