"""Streams of clients that have other routers to ask. A router that leaves ends them, and they go on
there. Lives in its event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.errors import RefusalReason, Refused
from router.text.generation import TextGeneration


class MovableStreams:
    def __init__(self) -> None:
        self._running: set[TextGeneration] = set()
        self._send_away = False

    def send_away(self) -> None:
        """Those that run, and those that begin later."""
        self._send_away = True
        for generation in self._running:
            generation.send_away()

    @contextmanager
    def running(self, generation: TextGeneration, *, can_go_on: bool) -> Iterator[None]:
        """Raises Refused behind all that was delivered, if it was sent away."""
        if can_go_on:
            self._running.add(generation)
            if self._send_away:
                generation.send_away()
        try:
            yield
        finally:
            self._running.discard(generation)
        if generation.was_sent_away:
            told = "this router is stopping: go on at another one"
            raise Refused(RefusalReason.DRAINING, told, retry_after_s=1.0)
