"""How a change reaches the cluster's controller, always as `Admin.Change`.

A router passes on what it is asked, by Ray, which finds a controller that it has started again too.
A command that joins this Ray asks at the controller's own door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import ray
from ray.exceptions import RayError

from cluster.on_ray.actor import own_host, reachable
from cluster.on_ray.asked import Asked, Denied, Granted, told, wish_of
from cluster.process.net import bind_port, grpc_server
from kvrelay.access.values import Access
from kvrelay.v1.admin_pb2 import ChangeRequest, ChangeResponse
from kvrelay.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from router.grpc_api.changes import NobodyAnswers, answered

if TYPE_CHECKING:
    from cluster.core.plan import ClusterPlan

ANSWER_S = 45.0
"""Ray needs a few seconds to start a controller again. It gets what was asked meanwhile."""


@dataclass(frozen=True, slots=True)
class ToController:
    """Implements Changes. `name` and `namespace` are those of the controller's actor."""

    name: str
    namespace: str

    async def change(self, asked: ChangeRequest) -> ChangeResponse:
        return told(await self._answer(wish_of(asked)))

    async def _answer(self, wish: Asked) -> Granted | Denied:
        try:
            found = await asyncio.to_thread(ray.get_actor, self.name, self.namespace)
            answer: Granted | Denied = await asyncio.wait_for(found.wish.remote(wish), ANSWER_S)
        except TimeoutError:
            raise NobodyAnswers(
                f"{self.name} has not answered for {ANSWER_S:g} s, and may still do it: see "
                "kvrelay top, and ask again"
            ) from None
        except (ValueError, RayError):
            raise NobodyAnswers(
                f"{self.name} does not answer: the cluster stops, or has lost its controller"
            ) from None
        return answer


@dataclass(frozen=True, slots=True)
class DoorAt:
    """HOST:PORT, and how it is called."""

    address: str
    access: Access


class Door(AdminServicer):
    """Answers `Change` alone. It listens as a router does inside, once it is asked where."""

    def __init__(self, hear: Callable[[Asked], Awaitable[Granted | Denied]]) -> None:
        self._hear = hear
        self._opening = asyncio.Lock()
        self._at: DoorAt | None = None
        self._server: grpc.aio.Server | None = None

    async def at(self, plan: ClusterPlan) -> DoorAt:
        """Raises ConfigError where no port is free."""
        async with self._opening:
            self._at = self._at or await self._open(plan)
        return self._at

    async def _open(self, plan: ClusterPlan) -> DoorAt:
        inside, ports = plan.routers[0].settings, plan.worker_pools[0].settings.port_range
        self._server = grpc_server(inside.access)
        add_AdminServicer_to_server(self, self._server)
        host = own_host(inside.internal_host)
        port = bind_port(self._server, host, ports, inside.access)
        await self._server.start()
        return DoorAt(f"{reachable(host)}:{port}", inside.access)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Change(  # noqa: N802
        self, request: ChangeRequest, context: grpc.aio.ServicerContext
    ) -> ChangeResponse:
        return await answered(self, request, context)

    async def change(self, asked: ChangeRequest) -> ChangeResponse:
        """Implements Changes."""
        return told(await self._hear(wish_of(asked)))
