"""When a client comes back after a refusal: at the time that the refusal names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import KvrelayError, Refused


@dataclass(slots=True, kw_only=True)
class Retries:
    """Of one request: at most `left` more, all of them by `until_s`, where it has a deadline."""

    left: int
    until_s: float | None = None

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """None: coming back won't help, or may not be. A delay that is given counts as a retry."""
        if not isinstance(error, Refused) or error.retry_after_s is None or not self.left:
            return None
        if self.until_s is not None and now_s + error.retry_after_s >= self.until_s:
            return None
        self.left -= 1
        return error.retry_after_s

    def remaining_s(self, now_s: float) -> float | None:
        """Of the deadline; None without one."""
        return None if self.until_s is None else max(0.0, self.until_s - now_s)
