"""A file that is there while a worker serves: for probes, which can't ask it without a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class ReadyFile:
    """None: there is no file."""

    path: Path | None

    def show(self, serves: bool) -> None:
        if self.path is None:
            return
        if serves:
            self.path.touch()
        else:
            self.path.unlink(missing_ok=True)


@contextmanager
def ready_file(path: Path | None) -> Iterator[ReadyFile]:
    """Without the file of a process that was killed; at the end it is not there."""
    file = ReadyFile(path)
    file.show(False)
    try:
        yield file
    finally:
        file.show(False)
