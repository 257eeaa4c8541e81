"""Jobs for peers: those for one peer in order, each peer's on a thread of their own.

So whoever puts a job never waits, and a peer that hangs holds up its own jobs only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Generic, TypeVar

Job = TypeVar("Job")

LINGER_S = 10.0
"""A thread that had nothing to do for this long ends."""
FAREWELL_S = 2.0
"""`close` waits this long for jobs that hang."""


def _rest() -> None:
    pass


class Lanes(Generic[Job]):
    """`work` does one job. `rest` is called by a thread for which no job waits, and at its end.
    `around` is entered by each thread, for its whole life; `crashed` hears what `work` raised.
    Thread safe."""

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        crashed: Callable[[BaseException], None],
        *,
        most: int | None = None,
        rest: Callable[[], None] = _rest,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """At most `most` jobs wait in a lane."""
        self._name = name
        self._work = work
        self._crashed = crashed
        self._most = most
        self._rest = rest
        self._around = around
        self._lock = threading.Lock()
        self._lanes: dict[str, queue.SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def put(self, lane: str, job: Job) -> bool:
        """False, and nothing changed, when too many wait there. Never waits for a job. Once closed,
        jobs are dropped."""
        with self._lock:
            if self._closed:
                return True
            jobs = self._lanes.get(lane)
            if jobs is None:
                jobs = self._open(lane)
            if self._most is not None and jobs.qsize() >= self._most:
                return False
            jobs.put(job)
        return True

    def clear(self, lane: str) -> None:
        """Drops the jobs that wait there."""
        with self._lock:
            jobs = self._lanes.get(lane)
            if jobs is not None:
                _drop(jobs)

    def close(self) -> None:
        """Drops all jobs that wait."""
        with self._lock:
            self._closed = True
            for jobs in self._lanes.values():
                _drop(jobs)
                jobs.put(None)
            threads = [*self._threads]
        until_s = time.monotonic() + FAREWELL_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _open(self, lane: str) -> queue.SimpleQueue[Job | None]:
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._run, args=(lane, jobs), name=f"{self._name} {lane}", daemon=True
        )
        thread.start()
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        self._lanes[lane] = jobs
        return jobs

    def _run(self, lane: str, jobs: queue.SimpleQueue[Job | None]) -> None:
        try:
            with self._around():
                while (job := self._next(lane, jobs)) is not None:
                    self._work(job)
                self._rest()
        except Exception as error:
            self._crashed(error)

    def _next(self, lane: str, jobs: queue.SimpleQueue[Job | None]) -> Job | None:
        """None: the thread's time is over."""
        with suppress(queue.Empty):
            return jobs.get_nowait()
        self._rest()
        while True:
            with suppress(queue.Empty):
                return jobs.get(timeout=LINGER_S)
            with self._lock:
                if jobs.empty():
                    del self._lanes[lane]
                    return None


def _drop(jobs: queue.SimpleQueue[Job | None]) -> None:
    with suppress(queue.Empty):
        while True:
            jobs.get_nowait()
