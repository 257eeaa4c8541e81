"""Named spans of one end of a measured transfer."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Trace:
    """Named spans of one process, in seconds of the machine's monotonic clock."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    enabled: bool = False

    @contextmanager
    def span(self, name: str):  # type: ignore[no-untyped-def]
        started_s = time.monotonic()
        yield
        if self.enabled:
            self.spans.append((name, started_s, time.monotonic()))
