"""What a controller reports to drivers and to `kvrelay status`, as values. Pure.

Also whether a process that starts waits for resources of Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.core.supervision import Phase
from cluster.on_ray.actor import RouterAt
from engine.core.activity import StartActivity


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReport:
    """For the driver. `notes` are the new ones only, `noted` counts all. `controller` is another id
    after each start of the controller."""

    controller: str
    phase: Phase
    settled: bool
    """Every process is there as desired, and serves."""
    error: str | None
    troubles: tuple[str, ...]
    """Which processes can't start, or which routers refused them, and why: they are not likely to
    serve."""
    notes: tuple[str, ...]
    noted: int
    model: str
    routers: tuple[RouterAt, ...]
    downloads: Mapping[str, StartActivity]
    """# process |-> progress of its download"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    name: str
    state: str
    address: str | None
    starts: int
    doing: str
    """Its activity while it starts, the reason if it is left out, else empty."""
    chosen: str
    """What it chose for itself on its machine, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    name: str
    phase: str
    routers: tuple[RouterAt, ...]
    processes: tuple[ProcessStatus, ...]


ROUNDING = 1e-3


def waits_for_room(asked: Mapping[str, float], pending: Iterable[Mapping[str, float]]) -> bool:
    """Whether the request of a process is among those that Ray has no room for."""
    return any(_are_equal(asked, one) for one in pending)


def _are_equal(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    names = {*ours, *(name for name in theirs if not name.startswith("node:"))}
    return all(abs(ours.get(name, 0.0) - theirs.get(name, 0.0)) < ROUNDING for name in names)
