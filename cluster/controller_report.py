"""What the controller of a cluster tells those that ask it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.actor import RouterAt
from cluster.supervision import Phase
from engine.activity import Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the driver prints and acts on. `notes` are the new ones only, `noted` counts all."""

    phase: Phase
    error: str | None
    notes: tuple[str, ...]
    noted: int
    model: str
    routers: tuple[RouterAt, ...]
    downloads: Mapping[str, Activity]
    """# process |-> how far it is"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    name: str
    state: str
    address: str | None
    starts: int
    doing: str
    """While it starts: what it says that it does; else nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    name: str
    phase: str
    routers: tuple[RouterAt, ...]
    processes: tuple[ProcessStatus, ...]
