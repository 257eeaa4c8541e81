"""What a worker's loop does for reads between caches: its own of others', and others' of its own.

Runs on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpool.handoff_events import FromPeer, PeerLost, SendPeer
from kvpool.openings import Openings
from kvpool.pull import BlocksPulled, PullBlocks, PullRead, PullWanted
from kvpool.pull_grants import PullGrants
from kvpool.tiers.restores import Restored


class PullTurns:
    def __init__(self, openings: Openings, clock: Callable[[], float]) -> None:
        self._now = clock
        self._openings = openings
        self._answers: list[SendPeer] = []

    def handle(self, event: FromPeer | PeerLost | BlocksPulled) -> list[Restored]:
        """What came of it for those that wait for a prefix."""
        grants = self._openings.grants
        if grants is not None:
            self._answers += self._answer(grants, event)
        return self._openings.pulled(event, self._now())

    def _answer(
        self, grants: PullGrants, event: FromPeer | PeerLost | BlocksPulled
    ) -> list[SendPeer]:
        match event:
            case FromPeer(peer=peer, message=PullWanted() as wanted):
                granted = grants.wanted(peer, wanted, self._now())
                return [SendPeer(peer=peer, message=granted)]
            case FromPeer(peer=peer, message=PullRead() as read):
                return [SendPeer(peer=peer, message=grants.read(peer, read))]
            case PeerLost(peer=peer):
                grants.lost(peer)
        return []

    def tick(self) -> list[Restored]:
        if self._openings.grants is not None:
            self._openings.grants.expire(self._now())
        return self._openings.expire(self._now())

    def take_commands(self) -> list[SendPeer | PullBlocks]:
        """To be executed, in order."""
        pulls = self._openings.take_pulls()
        if not self._answers:
            return pulls
        answers, self._answers = self._answers, []
        return [*answers, *pulls]
