"""The CPUs that this process may use, by its affinity and its control group; their cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")

Core = tuple[int, int]
"""Its package and its number there."""
LimitOf = Callable[[Path], float]


def allowed() -> frozenset[int]:
    """What taskset, Ray or a cpuset left to the main thread of this process."""
    return frozenset(os.sched_getaffinity(os.getpid()))


def quota(own_groups: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> float | None:
    """CPUs' worth of time that its control group, or one around it, may use; None: no limit."""
    limits = []
    for line in own_groups.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            limits += [*_limits(groups, path, _limit_of_v2)]
        elif "cpu" in controllers.split(","):
            limits += [*_limits(groups / "cpu", path, _limit_of_v1)]
    return min(limits, default=None)


def _limits(root: Path, path: str, limit: LimitOf) -> Iterator[float]:
    """Of the group and all around it. A container sees its own group as the root."""
    inner = PurePosixPath(path.lstrip("/"))
    for group in {root, *(root / part for part in (inner, *inner.parents))}:
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (found := limit(group)) > 0:
                yield found


def _limit_of_v2(group: Path) -> float:
    time, period = (group / "cpu.max").read_text().split()
    return int(time) / int(period)  # "max" is no number: no limit


def _limit_of_v1(group: Path) -> float:
    time, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return time / period


def cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> Mapping[int, Core]:
    """# CPU |-> its core; without a description each is one"""
    return {cpu: _core(topology / f"cpu{cpu}" / "topology", cpu) for cpu in cpus}


def _core(folder: Path, cpu: int) -> Core:
    with suppress(OSError, ValueError):
        package, number = (
            int((folder / name).read_text()) for name in ("physical_package_id", "core_id")
        )
        return package, number
    return 0, cpu


def ranges(cpus: Iterable[int]) -> str:
    """As the kernel writes them: 0-3,8."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][-1] + 1:
            spans[-1].append(cpu)
        else:
            spans.append([cpu])
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
