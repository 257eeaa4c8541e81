"""Writes the events and commands of a live router's core to a file, up to a bound."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from kvrelay.errors import ConfigError
from kvrelay.private_files import create_private
from router.core.events import Command, Event
from router.core.record import Entry, to_line
from router.core.start import Beginning

log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20


class Recorder:
    """Raises ConfigError if it can't write. At `most_bytes` it stops, and logs that."""

    def __init__(self, path: Path, most_bytes: int, beginning: Beginning) -> None:
        self._path = path
        self._left_bytes = most_bytes
        self._file: TextIO | None = None
        try:
            self._file = create_private(path, buffering=_BUFFER_BYTES)
        except OSError as error:
            reason = f"can't write it: {error.strerror}"
            raise ConfigError(f"router.record: {path}: {reason}") from None
        self._write(to_line(beginning))

    def heard(self, event: Event, commands: Sequence[Command], at_s: float) -> None:
        if self._file is not None:
            self._write(to_line(Entry(at_s=at_s, event=event, commands=tuple(commands))))

    def _write(self, line: str) -> None:
        assert self._file is not None
        self._left_bytes -= len(line) + 1
        if self._left_bytes < 0:
            log.warning("%s is full: no more is recorded", self._path)
            self.close()
            return
        self._file.write(line + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
