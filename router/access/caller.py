"""Who calls, and what is its own: a part of the cache, and the ids of its requests. Pure.

A tenant's part of the cache has a name that only the cluster can make: HMAC-SHA256, under the
cluster's key, of the tenant and what its client divides it by. So no field of a request leads into
another tenant's part. The name begins with the tenant's, by which workers share their time.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.core.layout.hashes import TENANT_MARK, tenant_label
from router.access.limits import Meter

DEFAULT_TENANT = "default"
"""Of keys that were given without a file."""
_SPACE_DIGITS = 32


def cache_space(cluster_key: bytes, tenant: str, division: str) -> str:
    """`division`: what the request itself says, over HTTP `cache_salt`."""
    told = json.dumps(["kvrelay cache space", tenant, division]).encode()
    digest = hmac.digest(cluster_key, told, "sha256").hex()
    return f"{tenant}{TENANT_MARK}{digest[:_SPACE_DIGITS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`tenant` empty: the cluster has no API keys. `tiers` empty: it may use all. `key_id` is that
    of its API key. `own_space`: its part of the cache, not divided."""

    tenant: str = ""
    key_id: str = ""
    own_space: str = ""
    tiers: Sequence[str] = ()
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    cluster_key: bytes = field(default=b"", repr=False)

    def space(self, division: str) -> str:
        """The name of its part of the cache. Without API keys whoever knows the name may use it."""
        if not self.tenant:
            return division
        if not division:
            return self.own_space
        return cache_space(self.cluster_key, self.tenant, division)

    def own_id(self, request_id: str) -> str:
        """The id of its request inside the cluster: no other tenant's can be the same."""
        return f"{tenant_label(self.tenant)}/{request_id}" if self.tenant else request_id


ANYBODY = Caller()
"""Where the cluster has no API keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySources:
    """Where the keys are: a file, and SHA-256 digests of keys of the default tenant. Without
    either, a cluster has no keys and lets everybody in."""

    file: str | None = None
    digests: tuple[str, ...] = ()

    @property
    def guarded(self) -> bool:
        return self.file is not None or bool(self.digests)

    def space_of(self, cluster_key: bytes, tenant: str) -> str:
        """Where a tenant's requests without a `cache_salt` look for cached KV."""
        return cache_space(cluster_key, tenant or DEFAULT_TENANT, "") if self.guarded else tenant


NO_KEYS = KeySources()
