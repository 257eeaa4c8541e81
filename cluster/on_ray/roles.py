"""The roles of a cluster's workers on Ray: gives them new ones, and follows the offered work.

Every wish to change a role goes through the supervisor, which remembers it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.core.desired import pool_of
from cluster.core.elastic.rules import RoleRules
from cluster.core.supervision import (
    Phase,
    RoleAsked,
    RoleRefused,
    RoleTaken,
    SetRole,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from cluster.elastic.keeper import EVERY_S, RoleKeeper
from cluster.on_ray.actor import RouterAt
from cluster.process.admin import NotKnown, NotPossible, flip
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError
from kvrelay.types import Role

if TYPE_CHECKING:
    from cluster.on_ray.fleet import Fleet

RETRY_S = 1.0


class Roles:
    """Lives in the controller's event loop. `routers`: those that have served. `say`: for the
    people who watch."""

    def __init__(
        self,
        fleet: Fleet,
        core: Supervisor,
        routers: Callable[[], Sequence[RouterAt]],
        tell: Callable[[SupervisorEvent], None],
        say: Callable[[str], None],
    ) -> None:
        self._fleet, self._core, self._routers_at = fleet, core, routers
        self._tell, self._say = tell, say
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def set(self, command: SetRole) -> None:
        """Until it is done, or no longer wished."""
        name, life, role = command.name, command.life, command.role
        async with self._changing[name]:
            while self._is_wished(command):
                try:
                    await asyncio.to_thread(flip, name, role, self._routers()[0], self._access)
                except NotPossible as error:
                    self._tell(RoleRefused(name, life, role, str(error)))
                    return
                except (ConfigError, NotKnown, IndexError):  # a router that knows it will come
                    await asyncio.sleep(RETRY_S)
                else:
                    self._tell(RoleTaken(name, life, role))
                    return

    def _is_wished(self, command: SetRole) -> bool:
        worker = self._core.current(command.name, command.life)
        return worker is not None and not worker.leaves and worker.role is command.role

    def _routers(self) -> list[str]:
        return [router.internal_grpc for router in self._routers_at()]

    @property
    def _access(self) -> Access:
        return self._fleet.plan.routers[0].settings.access

    async def keep(self) -> None:
        """As the plan says by now, until the cluster has stopped."""
        keeper: RoleKeeper | None = None
        known: list[str] = []
        while self._core.phase is not Phase.STOPPED:
            await asyncio.sleep(EVERY_S)
            rules = self._fleet.plan.roles
            if rules is None or self._core.phase is not Phase.READY:
                keeper = None
                continue
            if keeper is None or keeper.rules != rules:
                keeper = self._keeper(known, rules)
            known[:] = self._routers()
            for name, role in await asyncio.to_thread(keeper.turn):
                self._say(f"{name} becomes a {role} worker: the offered work asks for it")

    def _keeper(self, known: list[str], rules: RoleRules) -> RoleKeeper:
        loop = asyncio.get_running_loop()

        def change(name: str, role: Role) -> None:
            loop.call_soon_threadsafe(self._tell, RoleAsked(name, role))

        return RoleKeeper(
            routers=lambda: known,
            rules=rules,
            access=self._access,
            change=change,
            may_change=self._may_change,
        )

    def _may_change(self, name: str) -> bool:
        pool = self._fleet.plan.worker_pool(pool_of(name))
        return pool is not None and pool.role is None
