"""The memory of this host that a process may have, as Linux and its control groups limit it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFiles:
    """Names of a control group's files. `cache`: the row of memory.stat that counts the file cache
    that can be dropped at once."""

    limit: str
    used: str
    cache: str


VERSION_1 = GroupFiles(
    limit="memory.limit_in_bytes", used="memory.usage_in_bytes", cache="total_inactive_file"
)
VERSION_2 = GroupFiles(limit="memory.max", used="memory.current", cache="inactive_file")


def total_bytes(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """The memory of the machine or of the container, whichever is less."""
    limits = (limit for limit, _ in _limits(own_groups, groups))
    return min([psutil.virtual_memory().total, *limits])


def available_bytes(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """The memory that processes can still take here. File caches count as available."""
    rooms = (max(0, limit - used) for limit, used in _limits(own_groups, groups))
    return min([psutil.virtual_memory().available, *rooms])


def _limits(own_groups: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without caches) of the process's group and of each group around it that has a
    limit. A container sees its own group as the root."""
    for root, inner, files in _memory_groups(own_groups, groups):
        for group in {root, *(root / part for part in (inner, *inner.parents))}:
            with suppress(OSError, ValueError):  # "max" is no number: no limit
                limit = int((group / files.limit).read_text())
                used = int((group / files.used).read_text())
                yield limit, used - _cache_bytes(group, files)


def _memory_groups(
    own_groups: Path, groups: Path
) -> Iterator[tuple[Path, PurePosixPath, GroupFiles]]:
    with suppress(OSError):
        for line in own_groups.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            inner = PurePosixPath(path.lstrip("/"))
            if number == "0":
                yield groups, inner, VERSION_2
            elif "memory" in controllers.split(","):
                yield groups / "memory", inner, VERSION_1


def _cache_bytes(group: Path, files: GroupFiles) -> int:
    with suppress(OSError, ValueError):
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == files.cache), 0)
    return 0


def return_freed() -> None:
    """Gives freed memory back to Linux. glibc keeps blocks of less than 32 MB (mallopt(3),
    M_MMAP_THRESHOLD), and those of threads that loaded weights are of no use to other threads."""
    with suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
