"""Which requests are the work of clients that were refused lately, and come back. Pure.

A client that brings its promise back is known by it. One without is known by what it sends again:
its tenant, prompt, `max_tokens` and `n` (the request's digest). Nothing in that names the client,
and request ids are new with each try. So clients that send the same prompt, as load tests do, look
like one that comes back, until one of them asks while another is served: from then on each is new
work, for as long as that is seen. Otherwise offered work would shrink to what is served just when
workers are missing.

    (unknown) --refused--> refused --admitted--> served --refused--> refused
                              |                    |
                              '- asks: the same    '- asks: new work; meanwhile served: `shared`
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import inf

from router.core.promises.work import ToldPromise

SAME_S = 180.0
"""Who was refused so lately is the same work: three times the longest mean of offered work. Clients
that wait longer between two tries (SDKs wait a minute at most) count again, in another mean."""
MOST_REFUSED = 50_000
"""Digests that are kept; without one, a client that comes back counts again."""


@dataclass(slots=True)
class _Asked:
    """`served`: the request that was admitted since. `shared_s`: when several clients were last
    seen to ask for the same."""

    refused_s: float = -inf
    served: str | None = None
    shared_s: float = -inf


class Returning(dict[int, _Asked]):
    """# digest |-> what became of it; the one that was refused last is the last"""

    def refused(self, digest: int, now_s: float) -> None:
        asked = self.pop(digest, None) or _Asked()
        asked.refused_s, asked.served = now_s, None
        self[digest] = asked
        self._forget(now_s)

    def admitted(self, digest: int, request_id: str) -> None:
        """One that was refused."""
        self[digest].served = request_id

    def is_back(
        self, digest: int, now_s: float, open_requests: Container[str], *, is_due: bool = False
    ) -> bool:
        """Whether a request that brings no promise is one that was refused. `is_due`: one like it
        has a promise for now."""
        asked = self.get(digest)
        if asked is None:
            return is_due
        if asked.served is not None and asked.served in open_requests:
            asked.shared_s = now_s
        if now_s - asked.shared_s <= SAME_S:
            return False
        return is_due or (asked.served is None and now_s - asked.refused_s <= SAME_S)

    def _forget(self, now_s: float) -> None:
        """The one that was just refused stays."""
        while True:
            digest, asked = next(iter(self.items()))
            if len(self) <= MOST_REFUSED and now_s - asked.refused_s <= SAME_S:
                return
            del self[digest]

    def validate(self) -> None:
        times = [one.refused_s for one in self.values()]
        assert len(times) <= MOST_REFUSED and times == sorted(times)


def tells_of_refusal(told: ToldPromise | None) -> bool:
    """A promise on its way with its client, also one whose time has come and gone."""
    return told is not None and told.due_in_s > -SAME_S
