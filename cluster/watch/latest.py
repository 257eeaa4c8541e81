"""The last report of each router of a list that changes, also of routers that are lost since."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from cluster.watch.follow import Following, followed
from kvrelay.access.values import Access
from kvrelay.v1.admin_pb2 import WatchReport

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """`heard_s`: when the report came; without any, when the router was asked first. `trouble`: why
    there is no newer one."""

    address: str
    report: WatchReport | None
    heard_s: float
    trouble: str = ""


@dataclass(slots=True)
class _Followed:
    following: Following
    ends: ExitStack
    last: Heard


@dataclass(slots=True)
class LatestReports:
    """Follows each router by a call that stays open, until it is asked for no more."""

    access: Access
    _followed: dict[str, _Followed] = field(default_factory=dict)

    def of(self, routers: Sequence[str]) -> list[Heard]:
        for address in self._followed.keys() - set(routers):
            self._followed.pop(address).ends.close()
        return [self._latest(address) for address in dict.fromkeys(routers)]

    def close(self) -> None:
        """All threads have ended when it returns."""
        self.of(())

    def _latest(self, address: str) -> Heard:
        known = self._followed.get(address)
        if known is None:
            known = self._followed[address] = self._follow(address)
        (now,) = known.following.now()
        trouble = now.trouble
        if (refusal := known.following.refusal) is not None:
            trouble = str(refusal)
            self._begin_again(address, known)
        known.last = Heard(
            address=address,
            report=now.report or known.last.report,
            heard_s=known.last.heard_s if now.report is None else now.heard_s,
            trouble=trouble,
        )
        return known.last

    def _follow(self, address: str) -> _Followed:
        ends = ExitStack()
        following = ends.enter_context(followed([address], INTERVAL_S, self.access))
        asked = Heard(address=address, report=None, heard_s=time.monotonic())
        return _Followed(following, ends, asked)

    def _begin_again(self, address: str, known: _Followed) -> None:
        """It has refused us: its thread has ended."""
        known.ends.close()
        again = self._follow(address)
        known.following, known.ends = again.following, again.ends
