"""The two files of `kvrelay batch`. Its output grows by whole lines only; what an interrupted write
left of a line is cut off."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.cli.for_users.batch_lines import Done
from kvrelay.errors import ConfigError

OWNER_ONLY = 0o600
"""Answers may be as private as the prompts."""


def count_lines(path: Path) -> int:
    """Those that aren't empty."""
    with path.open("rb") as file:
        return sum(1 for text in file if text.strip())


class Output:
    """Appends lines to a file that no one else writes to."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.done = Done()

    def append(self, line: bytes) -> None:
        """One write, so that a killed process leaves a whole line or, on a full disk, a torn last
        one. Raises ConfigError when it can't be written."""
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise ConfigError(f"{self._path}: can't write it: {error.strerror}") from None
        if written < len(line):
            raise ConfigError(f"{self._path}: can't write it: the disk is full")

    def read(self) -> None:
        """What is there already becomes `done`; a torn last line is cut off."""
        kept = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                if text.strip():
                    self.done.read(f"{self._path}: line {number}", text)
                kept += len(text)
        os.ftruncate(self._descriptor, kept)


@contextmanager
def opened(path: Path) -> Iterator[Output]:
    """Raises ConfigError when it can't be written, or another process writes to it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, OWNER_ONLY)
    except OSError as error:
        raise ConfigError(f"{path}: can't write it: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        output = Output(path, descriptor)
        output.read()
        yield output
        os.fsync(descriptor)
    except BlockingIOError:
        raise ConfigError(f"{path}: another kvrelay batch writes to it") from None
    finally:
        os.close(descriptor)
