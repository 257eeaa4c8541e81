"""What this machine offers to a cluster that runs on it."""

from __future__ import annotations

import os

from cluster.resolve import Site


def local_site() -> Site:
    """CPUs that this process may use; workers listen on loopback."""
    from engine.bundled import checkpoint_path

    cpus = len(os.sched_getaffinity(0))
    return Site(
        total_cpus=cpus, node_cpus=cpus, host="127.0.0.1", bundled_path=str(checkpoint_path())
    )
