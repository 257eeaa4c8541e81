"""One peer's memory over NIXL: which regions it has granted, and copies to and from them.

Shared by all connections to that peer. One copy runs at a time; whoever holds the lock knows that
none does, which is how a region or the peer itself is given up safely. `check` raises PeerError
once the connection that asks has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from kvpool.transport import nixl_wire
from kvpool.transport.base import RegionName
from kvpool.transport.nixl_agent import Agent, Operation
from kvpool.transport.nixl_wire import Grant

_BOUNCE_BYTES = 4 * 2**20


class NixlPeer:
    def __init__(self, agent: Agent, address: str) -> None:
        self.users = 0  # connections; counted by the endpoint
        self._agent = agent
        self._address = address
        self._lock = threading.Lock()
        self._name = ""  # of the peer's agent, once anything is known
        self._known: dict[RegionName, Grant] = {}  # what our agent was told
        self._granted: set[RegionName] = set()  # those known that the peer still has
        self._bounce: torch.Tensor | None = None

    def ensure(self, region: RegionName) -> None:
        """Raises PeerError when the peer has no such region."""
        with self._lock:
            self._grant(region)

    def write(
        self, region: RegionName, offset: int, source: torch.Tensor, check: Callable[[], None]
    ) -> None:
        with self._lock:
            check()
            name, address = self._place(region, offset, source.numel())
            for piece, local in self._pieces(source):
                if local is not piece:
                    local.copy_(piece)
                self._agent.transfer(Operation.WRITE, local, name, address, check)
                address += piece.numel()

    def read(
        self, region: RegionName, offset: int, target: torch.Tensor, check: Callable[[], None]
    ) -> None:
        with self._lock:
            check()
            name, address = self._place(region, offset, target.numel())
            for piece, local in self._pieces(target):
                self._agent.transfer(Operation.READ, local, name, address, check)
                if local is not piece:
                    piece.copy_(local)
                address += piece.numel()

    def retire(self, region: RegionName) -> None:
        """Returns once nothing is written to it."""
        with self._lock:
            self._granted.discard(region)

    def drain(self) -> None:
        """Returns once no copy runs."""
        with self._lock:
            pass

    def rest(self) -> None:
        """No connection is left. What NIXL knows of the peer stays for the next one: UCX does not
        return all that it holds for a peer that is dropped and comes back."""
        with self._lock:
            self._granted.clear()
            if self._bounce is not None:
                self._agent.deregister(self._bounce)
                self._bounce = None

    def _place(self, region: RegionName, offset: int, nbytes: int) -> tuple[str, int]:
        """The peer's agent, and an address in its memory."""
        grant = self._grant(region)
        assert 0 <= offset <= offset + nbytes <= grant.nbytes, (offset, nbytes, grant.nbytes)
        return self._name, grant.address + offset

    def _grant(self, region: RegionName) -> Grant:
        if region not in self._granted:
            grant = nixl_wire.fetch(self._address, region)
            if region not in self._known:
                self._learn(region, grant)
            self._granted.add(region)
        return self._known[region]

    def _learn(self, region: RegionName, grant: Grant) -> None:
        if any(grant.overlaps(other) for other in self._known.values()):
            self._unlearn_retired()
        self._name = self._agent.add_peer(grant.description)
        self._known[region] = grant

    def _unlearn_retired(self) -> None:
        """NIXL would use a retired region's key for a new one in its place, and forgets a peer
        only as a whole."""
        self._agent.drop_peer(self._name)
        self._known = {name: self._known[name] for name in self._granted}
        for grant in self._known.values():
            self._agent.add_peer(grant.description)

    def _pieces(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each piece of `data` beside registered memory for it: itself, where it is registered."""
        if data.numel() == 0:
            return
        if self._agent.owns(data):
            yield data, data
            return
        bounce = self._bounce_buffer()
        for piece in data.split(bounce.numel()):
            yield piece, bounce[: piece.numel()]

    def _bounce_buffer(self) -> torch.Tensor:
        if self._bounce is None:
            self._bounce = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8)
            self._agent.register(self._bounce)
        return self._bounce
