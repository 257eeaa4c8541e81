"""A worker's other ranks, forked from a process that has imported what takes them seconds."""

from __future__ import annotations

import multiprocessing.connection
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine import follower
from engine.parallel import leader
from tests.forks import forks

Follow = Callable[[], None]
"""The main function of a rank's process."""


class ForkedRank:
    """What a leader asks of a subprocess.Popen."""

    def __init__(self, follow: Follow, pass_fds: Sequence[int]) -> None:
        with socket.socket(fileno=os.dup(pass_fds[0])) as end:
            self._process = forks().Process(target=_run, args=(follow, end))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._reading = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Several threads may wait."""
        if not multiprocessing.connection.wait([self._process.sentinel], timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired("a rank", timeout)
        with self._reading:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(follow: Follow, end: socket.socket) -> None:
    sys.argv = ["engine.follower", str(end.detach())]
    follow()


def fork_ranks(patched: pytest.MonkeyPatch, follow: Follow = follower.main) -> None:
    """From now on, those of this process."""

    def started(command: object, *, pass_fds: Sequence[int], **options: Any) -> ForkedRank:
        return ForkedRank(follow, pass_fds)

    faces = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    patched.setattr(leader, "subprocess", SimpleNamespace(Popen=started, **faces))
