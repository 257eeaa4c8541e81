"""Who changes the workers of a cluster, as the keeper of roles and numbers wishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.desired import pool_of
from cluster.core.elastic.fleet import Counts
from cluster.core.elastic.rules import ElasticRules, RoleRules
from cluster.process.admin import flip
from kvrelay.access.values import Access
from kvrelay.types import Role


class Owner(Protocol):
    def rules(self, names: Sequence[str]) -> ElasticRules:
        """`names`: of the workers that are there."""

    def expected(self) -> Mapping[str, Role]:
        """# all workers that there shall be, also those that still start |-> role"""

    def change(self, name: str, role: Role) -> None: ...

    def resize(self, more: Counts, leaving: Sequence[str]) -> None:
        """So many more of each role; these leave, and nobody comes in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesOfTheirOwn:
    """Implements Owner: all may change their roles; how many there are is up to those who start
    them."""

    role_rules: RoleRules
    routers: Callable[[], Sequence[str]]
    access: Access

    def rules(self, names: Sequence[str]) -> ElasticRules:
        flexible = frozenset(map(pool_of, names))
        return ElasticRules(
            roles=self.role_rules, flexible=flexible, sized={}, cooldown_s=0.0, start_s=0.0
        )

    def expected(self) -> Mapping[str, Role]:
        return {}

    def change(self, name: str, role: Role) -> None:
        flip(name, role, self.routers()[0], self.access)

    def resize(self, more: Counts, leaving: Sequence[str]) -> None:
        raise AssertionError("no rule asks for it")
