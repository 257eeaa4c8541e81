"""What the mutation tool changes, and that it finds the same pieces in two trees."""

from __future__ import annotations

from pathlib import Path

from bench.mutations.__main__ import cores, is_core, sampled
from bench.mutations.sites import MutationSite, common, mutated, sites_of
from bench.mutations.trial import module_name

SOURCE = b'''"""A module with 1 docstring."""

MOST = 4


class Queue:
    size: int = 0

    def add(self, one: int, limit: int = 8) -> bool:
        """Says 1 if it fits."""
        if self.size < limit and one in self:
            self.size += min(one, 2)
            self.told(f"{one + 1} more")
        assert self.size < 99, "never"
        return self.size == one

    def validate(self) -> None:
        raise ValueError(self.size < 5)


def first(values: list[int]) -> int:
    def is_small(value: int) -> bool:
        return value < 3

    return next(value for value in values if is_small(value))
'''


def sites() -> list[MutationSite]:
    return sites_of("queue.py", SOURCE)


def found(kind: str) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.function, one.before, one.after) for one in sites() if one.kind == kind]


def test_each_kind_is_found_with_its_function() -> None:
    add, small = "Queue.add", "first.<locals>.is_small"
    whole = "self.size < limit and one in self"
    assert found("comparison") == [
        (add, "self.size < limit", ("(self.size <= limit)", "(self.size >= limit)")),
        (add, "one in self", ("(one not in self)",)),
        (add, "self.size == one", ("(self.size != one)",)),
        (small, "value < 3", ("(value <= 3)", "(value >= 3)")),
    ]
    assert found("and/or") == [(add, whole, ("(self.size < limit or one in self)",))]
    assert found("negated condition") == [
        (add, whole, (f"(not ({whole}))",)),
        ("first", "is_small(value)", ("(not (is_small(value)))",)),
    ]
    assert found("min/max") == [(add, "min(one, 2)", ("max(one, 2)",))]
    assert [one[1] for one in found("removed statement")] == [
        "self.size += min(one, 2)",
        'self.told(f"{one + 1} more")',
    ]
    assert found("returned constant")[:2] == [
        (add, "return self.size == one", ("return True", "return False")),
        (small, "return value < 3", ("return True", "return False")),
    ]
    constants = [(where, before) for where, before, _ in found("constant")]
    assert constants == [("", "4"), ("", "0"), ("", "8"), (add, "2"), (small, "3")]


def test_a_mutation_changes_its_piece_alone() -> None:
    (swap,) = (one for one in sites() if one.kind == "min/max")
    text = mutated(SOURCE, swap, swap.after[0])
    assert text == SOURCE.replace(b"min(one", b"max(one")
    for site in sites():
        for after in site.after:
            assert mutated(SOURCE, site, after) != SOURCE


def test_what_two_trees_share_is_found_under_another_path() -> None:
    moved = b"import os\n\n\n" + SOURCE.replace(b"value < 3", b"value < 4")
    others = sites_of("core/line.py", moved)
    shared = common(sites(), others)
    assert {one.before for one in sites()} - {one.before for one in shared} == {
        "value < 3",
        "3",
        "return value < 3",
    }
    assert [one.key for one in common(others, sites())] == [one.key for one in shared]
    here, there = (sampled(group, 5, seed=3) for group in (shared, common(others, sites())))
    assert [(one.key, after) for one, after in here] == [(one.key, after) for one, after in there]
    assert {one.path for one, _ in there} == {"core/line.py"}


def test_what_stands_twice_is_not_shared() -> None:
    assert common(sites(), [*sites(), *sites()]) == []


def test_the_cores_are_those_of_the_import_contract() -> None:
    tree = Path(__file__).parents[2]
    assert {*cores(tree)} >= {"router/core", "kvpool/core", "prefill_worker", "decode_worker"}
    assert is_core("cluster.core")
    assert not is_core("cluster.sim.machines.clock")
    assert not is_core("engine.core")
    assert module_name("proto/kvrelay/types.py") == "kvrelay.types"
    assert module_name("router/core/__init__.py") == "router.core"
