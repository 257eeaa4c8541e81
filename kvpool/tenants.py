"""Whose cached blocks are whose, as far as reports may tell. Pure.

Who knows a tenant's name (over HTTP: `cache_salt`) finds its cache, so reports show a digest of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from kvpool.hashes import BlockHash

_ROOTS_MOST = 16_384
"""Of sequences whose first block is computed or cached."""
_SHOWN_MOST = 100
"""Tenants of one tier of one process."""
OTHERS = "others"


def tenant_label(tenant: str) -> str:
    """Eight hex digits; empty for those without a tenant."""
    if not tenant:
        return ""
    return blake2b(tenant.encode(), digest_size=4, person=b"kvrelay-tenant").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBlocks:
    """Cached blocks under one label, with the ages of the first and the last that came."""

    tenant: str
    blocks: int
    oldest_s: float
    newest_s: float


def most_of(found: Iterable[TenantBlocks]) -> list[TenantBlocks]:
    """Those with the most blocks, the others together as `others`."""
    ordered = sorted(found, key=lambda one: (-one.blocks, one.tenant))
    shown, rest = ordered[:_SHOWN_MOST], ordered[_SHOWN_MOST:]
    if not rest:
        return shown
    others = TenantBlocks(
        tenant=OTHERS,
        blocks=sum(one.blocks for one in rest),
        oldest_s=max(one.oldest_s for one in rest),
        newest_s=min(one.newest_s for one in rest),
    )
    return [*shown, others]


@dataclass(slots=True)
class TenantRoots:
    """# first block of a tenant's sequence |-> the tenant's label; of the latest ones"""

    _labels: OrderedDict[BlockHash, str] = field(default_factory=OrderedDict)

    def note(self, root: BlockHash, label: str) -> None:
        self._labels[root] = label
        self._labels.move_to_end(root)
        while len(self._labels) > _ROOTS_MOST:
            self._labels.popitem(last=False)

    def label(self, root: BlockHash) -> str:
        return self._labels.get(root, "")
