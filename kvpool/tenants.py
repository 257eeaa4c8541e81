"""Whose cached blocks are whose, as far as reports may tell. Pure.

Who knows a tenant's name (over HTTP: `cache_salt`) finds its cache, so reports show a digest of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from kvpool.hashes import BlockHash

_ROOTS_MOST = 16_384
"""Of sequences whose first block is computed or cached."""


def tenant_label(tenant: str) -> str:
    """Eight hex digits; empty for those without a tenant."""
    if not tenant:
        return ""
    return blake2b(tenant.encode(), digest_size=4, person=b"kvrelay-tenant").hexdigest()


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
