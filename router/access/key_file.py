"""The file of API keys: read when it has changed, replaced whole. Runs in routers and the CLI."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.errors import ConfigError
from router.access.keys import ApiKey, dump_keys, parse_keys

_Seen = tuple[int, int, int]
"""Of a file: its inode, time of change and size."""


class KeyFile:
    """One reader of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: _Seen | None = None

    def read(self) -> tuple[ApiKey, ...]:
        """Raises ConfigError."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                self._seen = _seen(found)
                _check_owner(self.path, found)
                return parse_keys(file.read(), str(self.path))
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}: see kvrelay keys add") from None

    def read_if_changed(self) -> tuple[ApiKey, ...] | None:
        """None: it is as it was. Raises ConfigError, once for each change."""
        try:
            seen = _seen(self.path.stat())
        except OSError as error:
            if self._seen is None:
                return None
            self._seen = None
            raise ConfigError(f"{self.path}: {error.strerror}") from None
        if seen == self._seen:
            return None
        self._seen = seen
        return self.read()


def _seen(found: os.stat_result) -> _Seen:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Who may write the file lets in whom he likes."""
    if found.st_uid not in (0, os.getuid()):
        raise ConfigError(f"{path}: it belongs to another user: chown it to the router's")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: others may write it: chmod 600")


@contextmanager
def changing(path: Path) -> Iterator[list[ApiKey]]:
    """The keys, to be changed in place: they replace the file where the block ends well. One
    process at a time. Raises ConfigError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        keys = [*KeyFile(path).read()] if path.exists() else []
        yield keys
        _replace(path, dump_keys(keys))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Of the folder: the file itself is replaced."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, content: bytes) -> None:
    """Mode 0600. Readers see the whole old file or the whole new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
