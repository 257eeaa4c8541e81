"""One peer's memory over NIXL: which regions it has granted, and copies to and from them.

Shared by all connections to that peer. One batch runs at a time; whoever holds the lock knows that
none does, which is how a region or the peer itself is given up safely. `check` raises PeerError
once the connection that asks has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kvpool.transport import nixl_wire
from kvpool.transport.base import Read, RegionName, Write
from kvpool.transport.nixl_agent import Agent, Operation
from kvpool.transport.nixl_wire import Grant
from kvpool.transport.windowed import as_bytes

_BOUNCE_BYTES = 4 * 2**20

Pieces = list[tuple[torch.Tensor, int]]  # contiguous memory here, an address in the peer's


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

    def write(self, writes: Sequence[Write], check: Callable[[], None]) -> None:
        with self._lock:
            check()
            placed = self._placed((w.region, w.offset, w.source) for w in writes)
            registered, others = self._sorted(placed)
            self._transfer(Operation.WRITE, registered, check)
            for batch in self._bounced(others):
                for piece, local, _ in batch:
                    local.copy_(piece)
                self._transfer(Operation.WRITE, [b[1:] for b in batch], check)

    def read(self, reads: Sequence[Read], check: Callable[[], None]) -> None:
        with self._lock:
            check()
            placed = self._placed((r.region, r.offset, r.target) for r in reads)
            registered, others = self._sorted(placed)
            self._transfer(Operation.READ, registered, check)
            for batch in self._bounced(others):
                self._transfer(Operation.READ, [b[1:] for b in batch], check)
                for piece, local, _ in batch:
                    piece.copy_(local)

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

    def _placed(self, moves: Iterable[tuple[RegionName, int, torch.Tensor]]) -> Pieces:
        """Raises PeerError for a region that the peer does not have."""
        pieces = []
        for region, offset, data in moves:
            grant, nbytes = self._grant(region), data.nbytes
            assert 0 <= offset <= offset + nbytes <= grant.nbytes, (offset, nbytes, grant.nbytes)
            assert data.is_contiguous(), tuple(data.stride())
            if nbytes:
                pieces.append((data, grant.address + offset))
        return pieces

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

    def _sorted(self, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """Those in registered memory here, and the others."""
        owned = self._agent.owned([data for data, _ in pieces])
        return (
            [piece for piece, is_owned in zip(pieces, owned, strict=True) if is_owned],
            [piece for piece, is_owned in zip(pieces, owned, strict=True) if not is_owned],
        )

    def _transfer(self, operation: Operation, pieces: Pieces, check: Callable[[], None]) -> None:
        if pieces:
            self._agent.transfer(operation, pieces, self._name, check)

    def _bounced(self, pieces: Pieces) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, int]]]:
        """Batches that fit into registered memory: part of a piece, its place there, and the
        address in the peer's memory."""
        batch: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        used = 0
        for piece, local, address in self._cut(pieces):
            if used + piece.numel() > local.numel():
                yield batch
                batch, used = [], 0
            batch.append((piece, local[used : used + piece.numel()], address))
            used += piece.numel()
        if batch:
            yield batch

    def _cut(self, pieces: Pieces) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        for data, address in pieces:
            bounce = self._bounce_buffer()
            for part in as_bytes(data).split(bounce.numel()):
                yield part, bounce, address
                address += part.numel()

    def _bounce_buffer(self) -> torch.Tensor:
        if self._bounce is None:
            self._bounce = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8)
            self._agent.register(self._bounce)
        return self._bounce
