"""What this worker leaves behind for the case that it dies: see `cluster.process.witness`.

Before each step its sequences are written to a page of shared memory, unless they are those of the
step before. That takes microseconds.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path

from cluster.core.worker.last_words import PAGE_BYTES, Page, StepEntry, WorkerEnd, packed
from cluster.process.net import listening_socket
from cluster.process.witness import KEY_BYTES
from engine.core.step import RunStep, SequenceSlice
from kvrelay.errors import PeerError
from kvrelay.types import RequestKey

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
CLOSE_S = 2.0
KILLED_RANK = f"exit code {-9}"
_Sequences = list[tuple[RequestKey, int]]
_KEY_AND_CHOICE: Callable[[SequenceSlice], tuple[RequestKey, int]] = attrgetter("key", "choice")


class StepNotes:
    """Keeps the page up to date. `launched` and `ended` may be called by different threads."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._in_flight: deque[_Sequences] = deque()
        self._written: _Sequences = []
        self._packed: dict[tuple[int, int], bytes] = {}
        """# id of a key in `_written`, choice |-> its entry"""

    def launched(self, step: RunStep) -> None:
        """It goes to the device, perhaps while another step runs there."""
        flight = self._in_flight
        flight.append([*map(_KEY_AND_CHOICE, step.batch.slices)])
        now = _in_any([*flight])
        if now != self._written:
            self._write(now)

    def _write(self, now: _Sequences) -> None:
        """Most of them were in the step before."""
        before = self._packed
        self._packed = {
            (id(key), choice): before.get((id(key), choice)) or _packed(key, choice)
            for key, choice in now
        }
        self._page.write_step(self._packed.values())
        self._written = now

    def ended(self) -> None:
        """The step that was launched first."""
        self._in_flight.popleft()

    def blame(self, key: RequestKey) -> None:
        """What happened outside a step was for this request."""
        self._page.write_step([_packed(key, 0)])


def _in_any(steps: list[_Sequences]) -> _Sequences:
    *others, last = steps
    if all(one == last for one in others):
        return last
    return [*dict.fromkeys(one for step in steps for one in step)]


def _packed(key: RequestKey, choice: int) -> bytes:
    return packed(StepEntry(key.request_id, key.attempt, choice))


class LastWords:
    """`address` and `key` are for routers. Made by whoever runs a worker as this process; one
    process has one."""

    def __init__(self, host: str, port_range: tuple[int, int] | None) -> None:
        """Raises ConfigError if there is no port."""
        with ExitStack() as opened:
            listener = opened.enter_context(listening_socket(host, port_range))
            self.address = f"{host}:{listener.getsockname()[1]}"
            self.key = secrets.token_hex(KEY_BYTES // 2)
            memory = os.memfd_create("kvrelay-last-words")
            opened.callback(os.close, memory)
            os.ftruncate(memory, PAGE_BYTES)
            self._page = Page(memoryview(mmap.mmap(memory, PAGE_BYTES)))
            words, self._pipe = os.pipe()
            opened.callback(os.close, words)
            self._witness = _start(memory, words, listener)
        os.write(self._pipe, self.key.encode())
        faulthandler.enable(self._pipe)
        self.notes = StepNotes(self._page)

    def crashed(self, error: BaseException, over: RequestKey | None = None) -> None:
        """An uncaught exception ends the worker; `over`: the request whose message was handled."""
        if over is not None:
            self.notes.blame(over)
        self._page.write_end(_end_of(error), f"{type(error).__name__}: {error}")

    def hung(self, why: str) -> None:
        self._page.write_end(WorkerEnd.HUNG_STEP, why)

    def close(self) -> None:
        """The worker ends because it was asked to, unless it has said otherwise. Idempotent."""
        if self._pipe < 0:
            return
        self._page.write_end(WorkerEnd.CLOSED)
        faulthandler.enable()
        os.close(self._pipe)
        self._pipe = -1
        if self._page.read_end()[0] is WorkerEnd.CLOSED:
            with suppress(subprocess.TimeoutExpired):
                self._witness.wait(CLOSE_S)


def _end_of(error: BaseException) -> WorkerEnd:
    """A rank that was killed takes the worker with it."""
    killed = isinstance(error, PeerError) and str(error).endswith(KILLED_RANK)
    return WorkerEnd.KILLED if killed else WorkerEnd.CRASHED


def _start(memory: int, words: int, listener: socket.socket) -> subprocess.Popen[bytes]:
    """In a session of its own: signals for the worker's group are not meant for it."""
    inherited = (memory, words, listener.fileno())
    return subprocess.Popen(
        [sys.executable, "-S", "-m", "cluster.process.witness", *map(str, inherited)],
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def key_of(event: object) -> RequestKey | None:
    """The request that an event from a router or a peer is about."""
    message = getattr(event, "message", None)
    found: Iterable[object] = (
        getattr(message, "key", None),
        getattr(getattr(message, "spec", None), "key", None),
    )
    return next((key for key in found if isinstance(key, RequestKey)), None)
