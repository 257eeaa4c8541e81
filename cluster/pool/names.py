"""By which names a pool node of a cluster and the workers of its host find each other. Pure."""

from __future__ import annotations


def pool_name(cluster: str) -> str:
    """What the pool node of a host listens at over shared memory."""
    return f"pool-{cluster}"


def host_pool_address(cluster: str) -> str:
    """Where this host's pool node of the cluster is, if there is one."""
    return f"shm:{pool_name(cluster)}"
