"""Which fault comes next: drawn from a seed, never one that takes the last of its kind. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

STOPS_S = (3.0, 20.0, 90.0)


class Kind(StrEnum):
    KILL = "killed"
    STOP = "stopped"
    BLACK_HOLE = "data ports that swallow everything"
    LOSSY = "lossy link"
    DISK_FULL = "full disk tier"
    MEMORY = "memory limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`target`: the name of a process, or of a link. `role` as of its process."""

    kind: Kind
    role: str
    target: str
    duration_s: float = 0.0

    @property
    def group(self) -> str:
        """Faults whose pauses are counted together."""
        if self.kind in (Kind.KILL, Kind.STOP):
            lasting = f" for {self.duration_s:g} s" if self.duration_s else ""
            return f"{self.role} {self.kind}{lasting}"
        return str(self.kind)

    def __str__(self) -> str:
        return f"{self.group}: {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A fault as it was made. `live`: streams that had begun; `on_it`: those of them that the
    target served. `in_force`: other faults at that time."""

    fault: Fault
    at_s: float
    until_s: float
    live: frozenset[int]
    on_it: frozenset[int]
    in_force: int


def possible(
    roles: Mapping[str, str], serving: Collection[str], extra: Iterable[Fault]
) -> list[Fault]:
    """`roles`: # process |-> its role. `serving`: those that work now. Another router, and another
    worker, must still serve when the fault has come."""
    found = [
        fault
        for name in serving
        if _can_be_missed(roles[name], roles, serving)
        for fault in _of_process(name, roles[name])
    ]
    return [*found, *(one for one in extra if one.target not in roles or one.target in serving)]


def _of_process(name: str, role: str) -> list[Fault]:
    stops = [Fault(kind=Kind.STOP, role=role, target=name, duration_s=s) for s in STOPS_S]
    return [Fault(kind=Kind.KILL, role=role, target=name), *stops]


def _can_be_missed(role: str, roles: Mapping[str, str], serving: Collection[str]) -> bool:
    alike = {"router": ("router",), "pool": (), "controller": ()}.get(role, ("prefill", "decode"))
    return not alike or sum(roles[name] in alike for name in serving) > 1


def drawn(candidates: Collection[Fault], rng: Random) -> Fault | None:
    """Each group that is possible is equally likely, then each target. None: none is possible."""
    groups: dict[str, list[Fault]] = {}
    for fault in sorted(candidates, key=str):
        groups.setdefault(fault.group, []).append(fault)
    if not groups:
        return None
    return rng.choice(groups[rng.choice([*groups])])
