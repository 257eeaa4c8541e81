"""The threads of one endpoint: started by name, all joined at its close."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ThreadGroup:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Raises RuntimeError where the host has no thread left."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)

    def join(self) -> None:
        """Wait for all but the calling thread, which may be one of them (close in a callback)."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
