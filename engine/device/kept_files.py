"""Files in the cache folder that the next start reuses: compiled code, and what becomes code.

Who can change them runs code in our processes. So they are taken only if the folder and the file
are this user's and nobody else can write them, and if the content is what was kept.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotKept(Exception):
    """There is no such file, or it can't be trusted; the message says why."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvrelay"


def own_folder(folder: Path) -> Path:
    """`folder`, made if it isn't there, with mode 0700; if others can write it, a new one that is
    used by this process alone. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    why = _why_not_ours(folder.stat())
    return folder if why is None else _instead_of(folder, why)


@cache
def _instead_of(folder: Path, why: str) -> Path:
    found = Path(tempfile.mkdtemp(prefix="kvrelay-"))
    log.warning("the cache folder %s is not used, because %s: %s for now", folder, why, found)
    return found


def _why_not_ours(found: os.stat_result) -> str | None:
    if found.st_uid != os.geteuid():
        return f"it belongs to the user {found.st_uid}"
    return "others can write it" if found.st_mode & _OTHERS_WRITE else None


def checked(path: Path) -> bytes:
    """The file's content. Raises NotKept, with a line in the log if there is a file."""
    try:
        content, kept = _read(path), _read(_digest_path(path))
        if kept != _digest(content):
            raise NotKept("its content is not what was kept")
    except FileNotFoundError:
        raise NotKept(f"{path} is not there") from None
    except (NotKept, OSError) as error:
        log.warning("%s is not used, and made again: %s", path, error)
        raise NotKept(str(error)) from error
    return content


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        why = _why_not_ours(os.fstat(descriptor))
        if why is not None:
            raise NotKept(why)
        return file.read()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time makes this file, also of several hosts that share the folder, if the
    file system can lock. Whoever waited looks again whether it is there."""
    with ExitStack() as stack:
        with suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def keep(path: Path, content: bytes) -> None:
    """Concurrent readers never see half of it; writers are `alone`. Raises OSError."""
    keep_digest(path, content)
    _write(path, content)


def keep_digest(path: Path, content: bytes) -> None:
    """Of a file that is put to `path` after this."""
    _write(_digest_path(path), _digest(content))


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).rename(path)


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.blake2b")


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=32).hexdigest().encode()
