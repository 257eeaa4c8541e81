"""Creates, finds, asks and kills the Ray actors of one cluster, by name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import ray
from ray._private.state import state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.core.desired import pool_of
from cluster.core.plan import ClusterPlan, RayResources, RouterPlan
from cluster.on_ray.actor import PoolNodeHost, RouterAt, RouterHost, WorkerHost
from kvrelay.types import Role

log = logging.getLogger(__name__)

NAMESPACE = "kvrelay"
CONTROLLER = "controller"
CALLS_AT_ONCE = 64
SMALL = 0.001
RETRY_S = 1.0

Handle = Any
"""Ray's actor handles have no useful type."""


def actor_name(cluster: str, process: str) -> str:
    return f"{cluster}/{process}"


def draining_nodes() -> dict[str, float]:
    """# node that is about to end |-> the seconds that it has left. Such are those of a pod that is
    deleted, and those that the autoscaler takes back. Ray Serve and Ray Train ask the same way."""
    ends_ms, now_s = state.get_draining_nodes(), time.time()
    return {node: ms / 1000 - now_s if ms else inf for node, ms in ends_ms.items()}


def pending_requests() -> list[dict[str, float]]:
    """The resources of each actor that Ray has no room for at present, one for all that are alike,
    as Ray tells its autoscaler."""
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    pending = get_cluster_resource_state(gcs).pending_resource_requests
    return [dict(one.request.resources_bundle) for one in pending]


class Fleet:
    """`own`: Ray is the cluster's own, on one machine. There are no nodes to choose from, and the
    cluster shares the CPUs out itself, so no process waits for CPUs of Ray."""

    def __init__(self, plan: ClusterPlan, *, own: bool = False) -> None:
        self.plan = plan  # with the ports of the routers that have served
        self.own = own
        self._handles: dict[str, Handle] = {}

    def create(
        self, name: str, node: str | None, role: Role | None, serving: Sequence[str]
    ) -> Handle:
        """A new actor, on this node of Ray if one is given, or the actor that an earlier controller
        left under this name. `role`: that of a new worker, which hears of the routers that are
        `serving`. Raises ValueError for one that the plan does not know any more."""
        routers = {router.settings.process: router for router in self.plan.routers}
        pool, nodes = self.plan.worker_pool(pool_of(name)), self.plan.pool
        if name in routers:
            router = routers[name]
            told = (router.settings, self._actor_name(CONTROLLER), NAMESPACE)
            made = self._make(name, RouterHost, told, router.placement)
        elif pool is not None and role is not None:
            worker = pool.worker(name, role)
            asked = (worker.settings, time.time(), tuple(serving))
            made = self._make(name, WorkerHost, asked, worker.placement)
        elif nodes is not None and node is not None:
            made = self._make(name, PoolNodeHost, (nodes.settings,), nodes.placement, node)
        elif (made := self.find(name)) is None:
            raise ValueError("the cluster has no such pool any more")
        self._handles[name] = made
        return made

    def placement(self, name: str) -> RayResources | None:
        """The resources of a router or worker."""
        routers = {router.settings.process: router for router in self.plan.routers}
        pool = self.plan.worker_pool(pool_of(name))
        if name in routers:
            return self._place(routers[name].placement)
        return None if pool is None else self._place(pool.placement)

    def _place(self, asked: RayResources) -> RayResources:
        return replace(asked, cpus=SMALL) if self.own and asked.cpus else asked

    def find(self, name: str) -> Handle:
        """The actor, made by this controller or an earlier one; None if there is none."""
        if name not in self._handles:
            with contextlib.suppress(ValueError):
                self._handles[name] = ray.get_actor(self._actor_name(name), namespace=NAMESPACE)
        return self._handles.get(name)

    def kill(self, name: str) -> None:
        handle = self.find(name)
        if handle is not None:
            ray.kill(handle, no_restart=True)
            del self._handles[name]

    def names(self) -> list[str]:
        """The processes of this cluster that Ray knows, whichever controller started them."""
        found = ray.util.list_named_actors(all_namespaces=True)
        actors = [actor["name"] for actor in found if actor["namespace"] == NAMESPACE]
        split = [name.partition("/") for name in actors]
        return [name for of, _, name in split if of == self.plan.name and name != CONTROLLER]

    def kill_strays(self) -> None:
        """Kills actors that an earlier controller started and this one doesn't know."""
        for name in self.names():
            log.warning("%s was left by an earlier controller", name)
            self.kill(name)

    def keep_ports(self, at: RouterAt) -> None:
        """A restarted router listens on the same ports as before."""
        routers = tuple(_at_ports(router, at) for router in self.plan.routers)
        if routers != self.plan.routers:
            self.plan = replace(self.plan, routers=routers)

    def _actor_name(self, name: str) -> str:
        return actor_name(self.plan.name, name)

    def _make(
        self,
        name: str,
        host: type,
        told: tuple[object, ...],
        place: RayResources,
        node: str | None = None,
    ) -> Handle:
        options = _ray_options(self._place(place))
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return (
            ray.remote(host)
            .options(name=self._actor_name(name), get_if_exists=True, **options)
            .remote(*told)
        )


def _at_ports(router: RouterPlan, at: RouterAt) -> RouterPlan:
    if router.settings.process != at.name:
        return router
    settings = replace(
        router.settings,
        http_port=at.http_port,
        grpc_port=at.grpc_port,
        internal_http_port=at.internal_http_port,
        internal_grpc_port=at.internal_grpc_port,
    )
    return replace(router, settings=settings)


def _ray_options(place: RayResources) -> dict[str, Any]:
    """Detached, so that a restarted controller finds its actors alive."""
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": CALLS_AT_ONCE,
        "num_cpus": place.cpus,
        "num_gpus": place.gpus,
        "resources": dict(place.custom),
    }
    if place.memory_bytes:
        options["memory"] = place.memory_bytes
    if place.accelerator_type:
        options["accelerator_type"] = place.accelerator_type
    if place.machine_devices:
        visible = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        options["runtime_env"] = {"env_vars": visible}
    return options


async def answer_of(method: Handle, *arguments: object) -> Any:
    """What an actor answers. A connection that breaks says nothing about the actor: it is asked
    again until it answers or Ray knows that it is dead."""
    while True:
        try:
            return await method.remote(*arguments)
        except ActorUnavailableError as error:
            log.warning("asking again: %s", reason_of(error))
        await asyncio.sleep(RETRY_S)


def reason_of(error: BaseException) -> str:
    """The reason in one line."""
    match error:
        case RayTaskError():
            cause = error.cause
            return f"{type(cause).__name__}: {cause}".splitlines()[0]
        case ActorUnavailableError():
            return "its connection broke"
        case RayActorError() if "creation task" in str(error):
            return str(error).strip().splitlines()[-1]
        case RayActorError():
            return "its process died"
        case _:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
