"""What a restarted controller must know of its cluster, in the key-value store of Ray's head.

The record outlives every process of the cluster, and the head itself if the head has a store. Ray
has no public interface for this; `ray.experimental.internal_kv` is what Ray's own libraries use.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from ray.exceptions import RayError
from ray.experimental import internal_kv

from cluster.core.members import Kept
from cluster.core.plan import ClusterPlan
from cluster.core.supervision import Phase, Roles
from cluster.on_ray.driver import DriverAt

NAMESPACE = b"kvrelay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """`plan`: with the ports that routers have got, so that they keep them. `driver`: the command
    whose end ends the cluster.
    `error`: why a STOPPING cluster stops. `kept`: what is known of its processes. `roles`: those of
    each pool's workers. `own`: Ray ends with the cluster."""

    plan: ClusterPlan
    driver: DriverAt | None
    phase: Phase = Phase.STARTING
    error: str | None = None
    kept: Mapping[str, Kept] = field(default_factory=dict)
    roles: Mapping[str, Roles] = field(default_factory=dict)
    own: bool = False


def new_key(cluster: str) -> str:
    """Another one for each run: a cluster never reads the record of an earlier one."""
    return f"{cluster}/{uuid4().hex}"


def put_record(key: str, record: ClusterRecord) -> None:
    internal_kv._internal_kv_put(key, pickle.dumps(record), namespace=NAMESPACE)


def get_record(key: str) -> ClusterRecord | None:
    """None when it was removed: the cluster is gone."""
    found = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    if found is None:
        return None
    record = pickle.loads(found)
    assert isinstance(record, ClusterRecord), key
    return record


def has_ended(cluster: str) -> bool:
    """Its controller removes the record at the end of a stop, and a command that kills all does."""
    try:
        return not internal_kv._internal_kv_list(f"{cluster}/", namespace=NAMESPACE)
    except RayError:
        return False


def remove_records(cluster: str, *, but: str | None = None) -> None:
    """All of this cluster's, also those of earlier runs that were killed."""
    for key in internal_kv._internal_kv_list(f"{cluster}/", namespace=NAMESPACE):
        if key.decode() != but:
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def remove_record(key: str) -> None:
    internal_kv._internal_kv_del(key, namespace=NAMESPACE)
