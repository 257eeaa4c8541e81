"""Whether the command that follows a cluster has ended. Ray knows: it sees the process end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import ray
from ray._private.state import jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverAt:
    """`job`: Ray's number of the driver process, not of a submitted job. `node`: Ray's name of the
    node that it runs on."""

    job: str
    node: str


class DriverState(Enum):
    RUNS = "runs"
    ENDED = "ended"
    LOST = "lost"
    """Its node is gone, and the process with it. Nobody wished that."""


def this_driver() -> DriverAt:
    context = ray.get_runtime_context()
    return DriverAt(job=context.get_job_id(), node=context.get_node_id())


def state_of(driver: DriverAt) -> DriverState:
    """Asks the head of Ray. A process that is silent or stopped still runs."""
    ended = any(job["JobID"] == driver.job and job["IsDead"] for job in jobs())
    if not ended:
        return DriverState.RUNS
    there = any(node["NodeID"] == driver.node and node["Alive"] for node in ray.nodes())
    return DriverState.ENDED if there else DriverState.LOST
