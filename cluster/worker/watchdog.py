"""Ends this process when a step on its device hangs: no other thread can be relied on then.

The thread of this module waits for nothing but its clock. (It can't run while another thread holds
Python's lock for ever; then the worker's heartbeats stop too, and routers do without it.)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from cluster.core.worker.watchdog import COUNTED_S, StepWatch

log = logging.getLogger(__name__)

EXIT_HUNG_STEP = 86
"""The exit status of a worker whose device hangs."""
PERIOD_S = COUNTED_S / 2
LAST_WORDS_S = 1.0
"""The log may hang too: then the process ends without a line."""


class Watchdog:
    def __init__(
        self,
        watch: StepWatch,
        compiles: Callable[[], str | None],
        end: Callable[[int], object] = os._exit,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`note` keeps the reason for those who live on; it must not wait for anything."""
        self.watch = watch
        self._note = note
        self._compiles = compiles
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrelay-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            hung = self.watch.look(time.monotonic(), self._compiles())
            if hung is not None:
                self._give_up(f"the device hangs: {hung}; this worker ends")
                return

    def _give_up(self, why: str) -> None:
        """Devices may be stuck for ever, so nothing is cleaned up."""
        self._note(why)
        spoken = threading.Thread(target=log.critical, args=("%s", why), daemon=True)
        spoken.start()
        spoken.join(LAST_WORDS_S)
        self._end(EXIT_HUNG_STEP)
