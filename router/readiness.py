"""Whether some request can be served now, and if not, why. Pure."""

from __future__ import annotations

from collections.abc import Collection

from kvrelay.types import Role
from router.placement import Pair
from router.view import WorkerView
from router.workers import Workers

_ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
_QUARANTINED = "handoffs failed lately between all prefill and decode workers: they are quarantined"


def obstacle(workers: Workers, quarantined: Collection[Pair]) -> str | None:
    """Why nothing can be served; None: something can."""
    if not workers:
        return "no worker has joined yet"
    if not workers.longest_tokens:
        return _missing(workers)
    prefills, decodes, alone = (_taking(workers, role) for role in _ROLES)
    if alone or (decodes and workers.decode_alone):
        return None
    if not prefills and not decodes:
        return "all workers drain"
    if not prefills or not decodes:
        return f"all {Role.PREFILL if decodes else Role.DECODE} workers drain"
    pairs = (Pair(p.incarnation, d.incarnation) for p in prefills for d in decodes)
    return _QUARANTINED if all(pair in quarantined for pair in pairs) else None


def _taking(workers: Workers, role: Role) -> list[WorkerView]:
    """Those of this role that take requests."""
    return [view for view in workers.of_role(role) if not view.draining]


def _missing(workers: Workers) -> str:
    """No pair of them can serve."""
    missing = [role for role in (Role.PREFILL, Role.DECODE) if not workers.of_role(role)]
    return f"no {' and no '.join(missing)} worker has joined yet"
