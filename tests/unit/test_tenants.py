"""Whose cached blocks are whose, in reports: a label that gives no name away."""

from __future__ import annotations

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout import hashes
from kvpool.core.layout.hashes import TenantRoots, tenant_label
from kvrelay.types import RequestKey
from tests.unit.worker_kit import BLOCK, LAYOUT


def cache(tables: BlockTables, tenant: str, first: int, blocks: int) -> None:
    tokens = range(first, first + blocks * BLOCK)
    names, holder = tables.chain(tenant, len(tokens)), Holder("prefill", RequestKey("r", 0))
    names.extend(tokens, BLOCK)
    names.extend(tokens, len(tokens))
    assert tables.try_grow(holder, len(tokens), now_s=0)
    tables.fill(holder, names.full(len(tokens)))
    tables.release(holder)


def test_a_label_is_short_stable_and_not_the_name() -> None:
    assert tenant_label("") == ""
    assert tenant_label("acme") == tenant_label("acme") != tenant_label("acne")
    assert len(tenant_label("acme")) == 8 and "acme" not in tenant_label("acme")


def test_all_blocks_of_a_chain_are_its_tenants() -> None:
    tables = BlockTables(LAYOUT, 16)
    for tenant in ("acme", "", "other"):
        cache(tables, tenant, 0, 3)
    found = {run.tenant: run.blocks for run in tables.device.tree}
    assert found == {tenant_label("acme"): 3, "": 3, tenant_label("other"): 3}


def test_only_the_latest_roots_are_kept(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(hashes, "_ROOTS_MOST", 2)
    roots = TenantRoots()
    for name in (b"a", b"b", b"a", b"c"):
        roots.note(name, name.decode())  # type: ignore[arg-type]
    assert [roots.label(name) for name in (b"a", b"b", b"c")] == ["a", "", "c"]  # type: ignore[arg-type]
