"""The reports of several routers, each followed by a thread of its own.

    connecting --report--> heard --router gone--> lost --RETRY_S--> connecting

A router that is lost is tried again for as long as someone looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from threading import Condition, Thread

import grpc

from cluster.process.admin import NotPossible, open_watch, reason_of
from kvrelay.access.values import Access
from kvrelay.v1.admin_pb2 import WatchReport

RETRY_S = 1.0
RATE_S = 10.0
STOPPED = "the router has stopped"


@dataclass(slots=True)
class Followed:
    """The latest `report` of one router, and when it came. `trouble`: why there is no newer one;
    empty: all is well. `news` counts what has changed. `before`: its report of RATE_S ago, or the
    first since then."""

    address: str
    report: WatchReport | None = None
    trouble: str = ""
    news: int = 0
    heard_s: float = 0.0
    before: WatchReport | None = None
    _lately: deque[WatchReport] = field(default_factory=deque)

    def hear(self, report: WatchReport) -> None:
        self._lately.append(report)
        while len(self._lately) > 2 and self._lately[1].uptime_s <= report.uptime_s - RATE_S:
            self._lately.popleft()
        self.before = self._lately[0] if len(self._lately) > 1 else None
        self.report, self.trouble, self.heard_s = report, "", time.monotonic()
        self.news += 1

    def lose(self, trouble: str) -> None:
        self._lately.clear()
        self.report, self.before, self.trouble = None, None, trouble
        self.news += 1


@dataclass(slots=True)
class Following:
    """What threads have heard, under one lock. `refusal`: what no second try would change."""

    routers: list[Followed]
    refusal: NotPossible | None = None
    _changed: Condition = field(default_factory=Condition)
    _ended: bool = False
    _shown: int = 0
    _calls: dict[str, grpc.Call] = field(default_factory=dict)

    def wait_first(self, timeout_s: float) -> bool:
        """Until each router has reported or is in trouble. Raises NotPossible."""
        with self._changed:
            known = self._changed.wait_for(self._all_known, timeout_s)
            self._raise_refusal()
            return known

    def wait_news(self, timeout_s: float) -> None:
        """Since `now` was last asked. Raises NotPossible."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            self._raise_refusal()

    def now(self) -> list[Followed]:
        with self._changed:
            self._shown = self._news()
            return [copy(router) for router in self.routers]

    def end(self) -> None:
        with self._changed:
            self._ended = True
            for call in self._calls.values():
                call.cancel()
            self._changed.notify_all()

    def follow(self, router: Followed, interval_s: float, access: Access) -> None:
        """Until `end`."""
        while not self._ended:
            try:
                with open_watch(router.address, interval_s, access) as call:
                    self._read(router, call)
                trouble = STOPPED
            except NotPossible as error:
                self._refuse(error)
                return
            except grpc.RpcError as error:
                trouble = reason_of(error)
            self._lose(router, trouble)

    def _read(self, router: Followed, call: grpc.Call) -> None:
        with self._changed:
            self._calls[router.address] = call
            if self._ended:
                call.cancel()
        for report in call:
            with self._changed:
                router.hear(report)
                self._changed.notify_all()

    def _lose(self, router: Followed, trouble: str) -> None:
        """And waits before the next try."""
        with self._changed:
            router.lose(trouble)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended, RETRY_S)

    def _refuse(self, error: NotPossible) -> None:
        with self._changed:
            self.refusal = error
            self._changed.notify_all()

    def _all_known(self) -> bool:
        return self.refusal is not None or all(one.news for one in self.routers)

    def _has_news(self) -> bool:
        return self.refusal is not None or self._news() != self._shown

    def _news(self) -> int:
        return sum(one.news for one in self.routers)

    def _raise_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal


@contextmanager
def followed(addresses: Sequence[str], interval_s: float, access: Access) -> Iterator[Following]:
    """All threads have ended when this has."""
    following = Following([Followed(address) for address in dict.fromkeys(addresses)])
    threads = [
        Thread(target=following.follow, args=(router, interval_s, access), daemon=True)
        for router in following.routers
    ]
    for thread in threads:
        thread.start()
    try:
        yield following
    finally:
        following.end()
        for thread in threads:
            thread.join()
