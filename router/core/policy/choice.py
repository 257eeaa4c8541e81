"""Which policies a router has, by name: a cluster file is read without loading them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """As in the cluster file's `router.placement` and `router.admission`."""

    placement: str = "kv_aware"
    admission: str = "predictive"
    queue_limit: int = 64
    move_hot_spots: bool = False
    local_prefill: bool = False
    shared_queue: bool = False

    @property
    def decode_alone(self) -> bool:
        """Decode workers can do without prefill workers."""
        return self.local_prefill and self.placement == "kv_aware"


DEFAULT_POLICIES = Policies()
