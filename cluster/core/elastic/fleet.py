"""The workers of a cluster, as those see them who decide about roles and numbers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.types import Role


class Counts(NamedTuple):
    """Workers of each role."""

    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


NOBODY = Counts(0, 0)
STARTS = -1
"""The work of a worker that still starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`running`: sequences that decode now. `starting`: workers that don't serve yet, by the role
    with which they begin. `settle_s`: how long changes of roles took lately. `is_known` is False
    while something was not heard lately: then there may be more work, or fewer workers."""

    prefill: int
    decode: int
    running: int
    starting: Counts = NOBODY
    settle_s: float = 0.0
    is_known: bool = True

    @property
    def workers(self) -> int:
        """That serve."""
        return self.prefill + self.decode

    @property
    def all(self) -> Counts:
        return Counts(self.prefill + self.starting.prefill, self.decode + self.starting.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A worker that may change: sequences that it decodes, or prompt tokens that wait there; less
    than none: it still starts."""

    name: str
    role: Role
    work: int


def fleet_of(
    there: Iterable[Busy], starting: Iterable[Busy], *, settle_s: float, is_known: bool = True
) -> Fleet:
    """`there`: all that serve and stay. `starting`: those that don't serve yet."""
    serving, begins = list(there), Counter(one.role for one in starting)
    return Fleet(
        prefill=sum(one.role is Role.PREFILL for one in serving),
        decode=sum(one.role is Role.DECODE for one in serving),
        running=sum(one.work for one in serving if one.role is Role.DECODE),
        starting=Counts(begins[Role.PREFILL], begins[Role.DECODE]),
        settle_s=settle_s,
        is_known=is_known,
    )


def idlest(workers: Iterable[Busy], role: Role, count: int) -> list[str]:
    """The names of those of this role with the least to do."""
    found = sorted((one for one in workers if one.role is role), key=lambda one: one.work)
    return [one.name for one in found[:count]]


def who_changes(workers: Iterable[Busy], more_prefill: int) -> tuple[list[str], Role]:
    """Those with the least to do, and their new role."""
    old, new = (Role.DECODE, Role.PREFILL) if more_prefill > 0 else (Role.PREFILL, Role.DECODE)
    return idlest(workers, old, abs(more_prefill)), new


def who_leaves(workers: Iterable[Busy], now: Counts, wanted: Counts) -> list[str]:
    """Those with the least to do of each role that has more than wanted."""
    there = list(workers)
    return [
        *idlest(there, Role.PREFILL, max(0, now.prefill - wanted.prefill)),
        *idlest(there, Role.DECODE, max(0, now.decode - wanted.decode)),
    ]
