"""Files of 32 random bytes, in hex: a cluster's token and its key.

Made when they are first needed. A file that others may read is refused, and so is one of another
user. Kubernetes mounts Secrets as root's, readable by the pod's group; that is allowed.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvrelay.access.values import TOKEN_BYTES
from kvrelay.errors import ConfigError

MODE = 0o600
FOLDER_MODE = 0o700
MOST_BYTES = 4096


def token_path(cluster: str) -> Path:
    return _folder() / f"{cluster}.token"


def key_path(cluster: str) -> Path:
    return _folder() / f"{cluster}.key"


def _folder() -> Path:
    given = os.environ.get("XDG_CONFIG_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".config"
    return home / "kvrelay"


def read_or_make(path: Path, key: str) -> bytes:
    """The file's bytes; random ones if there is none yet. Raises ConfigError that names the file
    and the `key` of cluster files that chooses another one."""
    found = read(path, key)
    if found is None:
        _make(path, key)
        found = read(path, key)
    if found is None:
        raise ConfigError(f"{key}: {path} is gone again")
    return found


def read(path: Path, key: str) -> bytes | None:
    """None: there is no such file. Raises ConfigError when it isn't ours alone, or holds no 32
    bytes in hex."""
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()), key)
            text = file.read(MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}") from None
    with suppress(ValueError):
        if len(found := bytes.fromhex(text.decode("ascii"))) == TOKEN_BYTES:
            return found
    digits = 2 * TOKEN_BYTES
    raise ConfigError(f"{key}: {path}: expected {digits} hex digits, as openssl rand -hex 32 makes")


def _check_private(path: Path, found: os.stat_result, key: str) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{key}: {path} belongs to another user ({found.st_uid})")
    ours = found.st_uid == os.geteuid()
    others = found.st_mode & (0o077 if ours else 0o037)
    if others:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{key}: others may read {path} ({mode:04o}): chmod 600 {path}")


def _make(path: Path, key: str) -> None:
    """Whoever else makes it at the same time may win: nobody ever sees half of it."""
    try:
        whole = _written_beside(path)
        try:
            with suppress(FileExistsError):
                os.link(whole, path)
        finally:
            whole.unlink()
    except OSError as error:
        raise ConfigError(
            f"{key}: can't make {path} ({error.strerror}): name a file in a folder of yours"
        ) from None


def replace(path: Path, key: str) -> None:
    """New random bytes. Raises ConfigError."""
    try:
        os.replace(_written_beside(path), path)
    except OSError as error:
        raise ConfigError(f"{key}: can't write {path}: {error.strerror}") from None


def _written_beside(path: Path) -> Path:
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    with os.fdopen(opened, "w") as file:
        file.write(f"{secrets.token_hex(TOKEN_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
    return beside
