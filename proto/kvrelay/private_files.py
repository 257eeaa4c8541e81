"""Files that hold what clients have sent: only this user may read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def create_private(path: Path, *, buffering: int = -1) -> TextIO:
    """Empty, and of mode 0600. Raises OSError, also for a symbolic link and for a file that belongs
    to somebody else."""
    descriptor = os.open(path, _FLAGS, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(0, "the file belongs to another user", str(path))
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "w", encoding="utf-8", buffering=buffering)
