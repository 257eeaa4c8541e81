"""The keeper of numbers leaves pools alone that have a number of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.core.elastic.fleet import STARTS, Busy, Counts
from cluster.core.elastic.rules import Bounds, ElasticRules, RoleRules, SizedPool
from cluster.elastic.keeper import Keeper
from kvrelay.access.values import NO_ACCESS
from kvrelay.types import Role

RULES = ElasticRules(
    roles=RoleRules(),
    flexible=frozenset(),
    sized={Role.DECODE: SizedPool("decode", Bounds(least=1, most=4))},
    cooldown_s=1.0,
    start_s=1.0,
)


class Owning:
    """Implements Owner."""

    def rules(self, names: Sequence[str]) -> ElasticRules:
        return RULES

    def expected(self) -> Mapping[str, Role]:
        return {"prefill-0": Role.PREFILL, "decode-1": Role.DECODE}

    def change(self, name: str, role: Role) -> None:
        raise AssertionError(name)

    def resize(self, more: Counts, leaving: Sequence[str]) -> None:
        raise AssertionError(leaving)


def test_a_worker_of_another_pool_that_starts_again_is_not_one_too_many() -> None:
    keeper = Keeper(routers=lambda: (), owner=Owning(), access=NO_ACCESS)
    assert keeper._starting([], RULES) == [Busy(name="decode-1", role=Role.DECODE, work=STARTS)]
