"""Roles and numbers of a cluster's workers on Ray: changes them, and follows the offered work.

Every wish to change a role goes through the supervisor, which remembers it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from cluster.core.elastic.fleet import Counts
from cluster.core.elastic.rules import ElasticRules
from cluster.core.supervision import (
    Phase,
    RoleAsked,
    RoleRefused,
    RoleTaken,
    SetRole,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from cluster.elastic.keeper import EVERY_S, Keeper
from cluster.on_ray.actor import RouterAt
from cluster.on_ray.wishes import Wishes
from cluster.process.admin import NotKnown, NotPossible, flip
from cluster.watch.latest import LatestReports
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError
from kvrelay.types import Role

if TYPE_CHECKING:
    from cluster.on_ray.fleet import Fleet

RETRY_S = 1.0
FLIPS_AT_ONCE = 16
NOT_YET = "%s has not the role %s yet, and is asked again: %s"
log = logging.getLogger(__name__)


class Roles:
    """Lives in the controller's event loop. `wishes` change numbers. `routers`: those that have
    served. `say`: for the people who watch."""

    def __init__(
        self,
        fleet: Fleet,
        core: Supervisor,
        wishes: Wishes,
        routers: Callable[[], Sequence[RouterAt]],
        tell: Callable[[SupervisorEvent], None],
        say: Callable[[str], None],
    ) -> None:
        self._fleet, self._core, self._wishes, self._routers_at = fleet, core, wishes, routers
        self._tell, self._say = tell, say
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Workers that hang shall hold up no thread that the controller uses for something else.
        self._threads = ThreadPoolExecutor(FLIPS_AT_ONCE, thread_name_prefix="flip")

    async def set(self, command: SetRole) -> None:
        """Until it is done, or no longer wished."""
        trouble = ""
        async with self._changing[command.name]:
            for turn in count():
                if not self._is_wished(command):
                    return
                try:
                    answer = await self._answer(command, self._router(turn))
                except (ConfigError, NotKnown) as error:  # a router that knows it will come
                    before, trouble = trouble, str(error)
                else:
                    self._tell(answer)
                    return
                if trouble != before:
                    log.warning(NOT_YET, command.name, command.role, trouble)
                await asyncio.sleep(RETRY_S)

    async def _answer(self, command: SetRole, router: str) -> RoleTaken | RoleRefused:
        """Raises ConfigError and NotKnown where it may be asked again."""
        name, life, role = command.name, command.life, command.role
        asked = partial(flip, name, role, router, self._access)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, asked)
        except NotPossible as error:
            return RoleRefused(name, life, role, str(error))
        return RoleTaken(name, life, role)

    def _is_wished(self, command: SetRole) -> bool:
        worker = self._core.current(command.name, command.life)
        return worker is not None and not worker.leaves and worker.role is command.role

    def _router(self, turn: int) -> str:
        """One after the other: one that has served may be gone. Raises ConfigError without any."""
        if not (routers := self._routers()):
            raise ConfigError("no router serves")
        return routers[turn % len(routers)]

    def _routers(self) -> list[str]:
        return [router.internal_grpc for router in self._routers_at()]

    @property
    def _access(self) -> Access:
        return self._fleet.plan.routers[0].settings.access

    async def keep(self) -> None:
        """As the plan says by now, until the cluster has stopped."""
        reports = LatestReports(self._access)
        try:
            await self._keep(reports)
        finally:
            await asyncio.to_thread(reports.close)

    async def _keep(self, reports: LatestReports) -> None:
        keeper: Keeper | None = None
        owner: OnRay | None = None
        known: list[str] = []
        while self._core.phase is not Phase.STOPPED:
            await asyncio.sleep(EVERY_S)
            rules = self._fleet.plan.elastic
            if rules is None or self._core.phase is not Phase.READY:
                keeper = None
                await asyncio.to_thread(reports.of, ())  # nobody is watched
                continue
            if self._wishes.are_unheard:
                continue
            if keeper is None or owner is None or owner.followed != rules:
                owner = OnRay(rules, self._wishes, self._tell)
                keeper = Keeper(routers=lambda: known, owner=owner, reports=reports)
            known[:], owner.workers = self._routers(), self._expected()
            for line in await asyncio.to_thread(keeper.turn):
                self._say(line)

    def _expected(self) -> dict[str, Role]:
        there = self._core.workers.values()
        return {one.name: one.role for one in there if not one.leaves and one.role is not None}


class OnRay:
    """Implements Owner: used by another thread, it acts in the controller's event loop."""

    def __init__(
        self, rules: ElasticRules, wishes: Wishes, tell: Callable[[SupervisorEvent], None]
    ) -> None:
        self.followed, self.workers = rules, dict[str, Role]()
        self._wishes, self._tell = wishes, tell
        self._loop = asyncio.get_running_loop()

    def rules(self, names: Sequence[str]) -> ElasticRules:
        return self.followed

    def expected(self) -> Mapping[str, Role]:
        return self.workers

    def change(self, name: str, role: Role) -> None:
        self._loop.call_soon_threadsafe(self._tell, RoleAsked(name, role))

    def resize(self, more: Counts, leaving: Sequence[str]) -> None:
        for name in leaving:
            self._loop.call_soon_threadsafe(self._wishes.let_go, name)
        for pool, added in self._more(more).items():
            self._loop.call_soon_threadsafe(self._wishes.add, pool, added)

    def _more(self, more: Counts) -> dict[str, int]:
        sized = self.followed.sized
        if None in sized:
            return {sized[None].name: more.workers} if more.workers else {}
        counts = {Role.PREFILL: more.prefill, Role.DECODE: more.decode}
        return {pool.name: counts[role] for role, pool in sized.items() if role and counts[role]}
