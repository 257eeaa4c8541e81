"""What a cluster's controller and routers say about it: the JSON of `kvrelay status`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from cluster.cli.top.screen import STATES
from cluster.on_ray.actor import RouterAt
from cluster.process.admin import report
from kvrelay.access.values import Access
from kvrelay.codec import MessageCodec
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.results import QuarantinedPair, WorkerInfo
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import inference_pb2

if TYPE_CHECKING:
    from cluster.on_ray.reports import ClusterStatus

ANSWER_S = 10.0

Facts = dict[str, object]
"""JSON: what `--format json` prints."""


def of_router(address: str, access: Access) -> Facts:
    """The router's report from its internal gRPC port at HOST:PORT. Raises ConfigError when no
    router answers."""
    return facts_of(report(address, access, timeout_s=ANSWER_S))


def facts_of(told: pb.WatchReport) -> Facts:
    return {
        "version": told.version,
        "cluster": told.cluster,
        "uptime_s": told.uptime_s,
        "ready": not told.not_ready and not told.leaving,
        "not_ready": told.not_ready or ("it is leaving" if told.leaving else ""),
        "running_requests": told.open_requests,
        "workers": [_worker(one) for one in told.workers],
        "quarantined": [asdict(_QUARANTINED.decode(pair)) for pair in told.quarantined],
    }


_INFO = MessageCodec(WorkerInfo, inference_pb2.WorkerInfo, "a router")
_QUARANTINED = MessageCodec(QuarantinedPair, inference_pb2.QuarantinedPair, "a router")


def _worker(told: pb.WatchedWorker) -> Facts:
    state, _ = STATES[told.state]
    return asdict(_INFO.decode(told.info)) | {"state": state, "role_epoch": told.role_epoch}


def of_cluster(name: str | None, address: str) -> Facts:
    """The reports of a cluster's controller and of each router that answers.

    Raises ConfigError when several clusters match, and KvrelayError when the controller is silent.
    """
    from cluster.on_ray.connect import joined

    with joined(address):
        status, access = _of_controller(name)
        servers = {router.name: _server(router, access) for router in status.routers}
        return asdict(status) | {"servers": servers}


def routers_of(name: str | None, address: str) -> tuple[list[str], Access]:
    """The internal gRPC address of each router of a cluster on this Ray, and how it is called.
    Raises like `of_cluster`."""
    from cluster.on_ray.connect import joined

    with joined(address):
        status, access = _of_controller(name)
    if not status.routers:
        raise KvrelayError(f"no router of {status.name} serves yet")
    return [router.internal_grpc for router in status.routers], access


def _of_controller(cluster: str | None) -> tuple[ClusterStatus, Access]:
    import ray

    from cluster.on_ray.launch import chosen, find_controller, running_clusters

    name = chosen(cluster, running_clusters())
    controller = find_controller(name)
    if controller is None:
        raise KvrelayError(f"the cluster {name} has just gone")
    try:
        asked = [controller.status.remote(), controller.access.remote()]
        status, access = ray.get(asked, timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise KvrelayError(f"the controller of {name} is silent for {ANSWER_S:g} s") from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise KvrelayError(f"the controller of {name} is lost: {reason}") from None
    return status, access


def _server(router: RouterAt, access: Access) -> Facts | None:
    """None while it doesn't answer."""
    with contextlib.suppress(ConfigError):
        return of_router(router.internal_grpc, access)
    return None


def as_json(facts: Facts) -> str:
    return json.dumps(facts, indent=2)
