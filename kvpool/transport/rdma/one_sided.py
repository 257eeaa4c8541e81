"""Exposes memory through an agent, and copies to and from peers' memory.

One batch to a peer runs at a time. A holder of its lock knows that none is running, so it can
safely give up a region or the peer. Unregistered memory passes through a staging buffer on the
host, one for each peer that needs it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from kvpool.transport.mapped.windowed import as_bytes
from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvpool.transport.peer.control_wire import Grant
from kvpool.transport.peer.exposure import Check, FetchGrant
from kvpool.transport.rdma.agent import Agent, Operation, RegionPiece, RegionPlace, device_of
from kvpool.transport.rdma.slab_memory import SlabMemory
from kvrelay.errors import ConfigError, PeerError

_STAGING_BYTES = 4 * 2**20

_Staged = list[tuple[torch.Tensor, RegionPiece]]  # memory that is not registered |-> its stand-in


class OneSidedExposure:
    def __init__(self, agent: Agent, slabs: SlabMemory) -> None:
        self._agent = agent
        self._slabs = slabs
        self._registered = Registered(agent)
        self._memory: dict[RegionName, torch.Tensor] = {}

    def allocate(self, nbytes: int, name: RegionName) -> torch.Tensor:
        return self._slabs.allocate(nbytes)

    def expose(self, name: RegionName, memory: torch.Tensor) -> None:
        if not self._slabs.reaches(memory):
            raise ConfigError(f"this transport reaches host memory only, not {memory.device}")
        self._registered.add(memory)
        self._memory[name] = memory

    def grant(self, name: RegionName, peer: socket.socket) -> Grant:
        memory = self._memory[name]
        key = self._agent.key(memory)
        place = RegionPlace(
            address=memory.data_ptr(), nbytes=memory.numel(), key=key, device=device_of(memory)
        )
        return Grant(payload=place.pack())

    def retire(self, name: RegionName) -> None:
        pass  # the memory stays until `free`: not every link stops a late write by itself

    def free(self, name: RegionName) -> None:
        self._registered.remove(self._memory.pop(name))

    def peer(self, address: str, fetch: FetchGrant) -> OneSidedPeer:
        return OneSidedPeer(self._agent, self._registered, fetch)

    @property
    def staging_bytes(self) -> int:
        return self._registered.staging_bytes

    def give_up(self) -> None:
        self._agent.give_up()

    def close(self) -> None:
        self._memory.clear()
        self._registered.close()


class Registered:
    """All memory that this process has registered with an agent. Thread safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._memory: list[torch.Tensor] = []  # memory adopted twice is listed twice
        self.staging_bytes = 0

    def add(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._agent.register(memory)
            self._memory.append(memory)

    def remove(self, memory: torch.Tensor) -> None:
        """Once for each `add` of this very tensor; does nothing if it is gone."""
        with self._lock:
            at = next((i for i, other in enumerate(self._memory) if other is memory), None)
            if at is not None:
                del self._memory[at]
                self._agent.deregister(memory)

    def close(self) -> None:
        for memory in list(self._memory):
            self.remove(memory)
        self._agent.close()

    def add_staging(self) -> torch.Tensor:
        staging = torch.zeros(_STAGING_BYTES, dtype=torch.uint8)
        self.add(staging)
        self.staging_bytes += staging.numel()
        return staging

    def remove_staging(self, staging: torch.Tensor) -> None:
        self.staging_bytes -= staging.numel()
        self.remove(staging)

    def hold(self, pieces: Sequence[torch.Tensor]) -> list[bool]:
        """For each piece, whether it is entirely inside one registered piece of memory."""
        with self._lock:
            spans = [(m.data_ptr(), m.data_ptr() + m.numel()) for m in self._memory]
        return list(_inside(spans, pieces))


def _inside(spans: list[tuple[int, int]], pieces: Sequence[torch.Tensor]) -> Iterator[bool]:
    """Neighbours are mostly in one span, so that of the previous piece is tried first."""
    start = end = 0
    for piece in pieces:
        at = piece.data_ptr()
        behind = at + piece.nbytes
        if not start <= at <= behind <= end:
            holding = ((a, b) for a, b in spans if a <= at and behind <= b)
            start, end = next(holding, (0, 0))
        yield end > 0


def _settle(tensors: Iterable[torch.Tensor]) -> None:
    """What the caller's stream still does with them is done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class OneSidedPeer:
    def __init__(self, agent: Agent, registered: Registered, fetch: FetchGrant) -> None:
        self._registered = registered
        self._fetch = fetch
        self._remote = agent.remote()
        self._lock = threading.Lock()
        self._places: dict[RegionName, RegionPlace] = {}  # that the peer still has
        self._staging: torch.Tensor | None = None

    def write(self, writes: Sequence[RegionWrite], check: Check) -> None:
        with self._lock:
            check()
            _settle(w.source for w in writes)
            pieces = self._placed((w.region, w.offset, w.source) for w in writes)
            registered, others = self._sorted(pieces)
            self._transfer(Operation.WRITE, registered, check)
            for batch in self._staged(others):
                for data, (stand_in, _, _) in batch:
                    stand_in.copy_(data)
                self._transfer(Operation.WRITE, [piece for _, piece in batch], check)

    def read(self, reads: Sequence[Read], check: Check) -> None:
        with self._lock:
            check()
            _settle(r.target for r in reads)
            pieces = self._placed((r.region, r.offset, r.target) for r in reads)
            registered, others = self._sorted(pieces)
            self._transfer(Operation.READ, registered, check)
            for batch in self._staged(others):
                self._transfer(Operation.READ, [piece for _, piece in batch], check)
                for data, (stand_in, _, _) in batch:
                    data.copy_(stand_in)

    def window(self, region: RegionName, check: Check) -> None:
        """Never mapped."""
        with self._lock:
            check()
            self._place(region)

    def retire(self, region: RegionName) -> None:
        with self._lock:
            if self._places.pop(region, None) is not None:
                self._remote.forget(region)

    def drain(self) -> None:
        with self._lock:
            pass

    def rest(self, patience_s: float) -> bool:
        if not self._lock.acquire(timeout=patience_s):
            raise PeerError("an earlier copy to or from it still runs")
        try:
            self._places.clear()
            if self._staging is not None:
                self._registered.remove_staging(self._staging)
                self._staging = None
            return self._remote.rest()
        finally:
            self._lock.release()

    def _placed(self, moves: Iterable[tuple[RegionName, int, torch.Tensor]]) -> list[RegionPiece]:
        """Raises PeerError for a region that the peer does not have."""
        pieces = []
        for region, offset, data in moves:
            place, nbytes = self._place(region), data.nbytes
            assert 0 <= offset <= offset + nbytes <= place.nbytes, (offset, nbytes, place.nbytes)
            assert data.is_contiguous(), tuple(data.stride())
            if nbytes:
                pieces.append((data, region, place.address + offset))
        return pieces

    def _place(self, region: RegionName) -> RegionPlace:
        place = self._places.get(region)
        if place is None:
            place = RegionPlace.unpack(self._fetch(region).payload)
            self._remote.learn(region, place)
            self._places[region] = place
        return place

    def _sorted(self, pieces: list[RegionPiece]) -> tuple[list[RegionPiece], list[RegionPiece]]:
        """Pieces in registered memory here, and the others."""
        held = self._registered.hold([piece[0] for piece in pieces])
        return (
            [piece for piece, is_held in zip(pieces, held, strict=True) if is_held],
            [piece for piece, is_held in zip(pieces, held, strict=True) if not is_held],
        )

    def _transfer(self, operation: Operation, pieces: list[RegionPiece], check: Check) -> None:
        if pieces:
            self._remote.transfer(operation, pieces, check)

    def _staged(self, pieces: list[RegionPiece]) -> Iterator[_Staged]:
        """In batches that fit into the staging buffer."""
        batch: _Staged = []
        used = 0
        for data, region, address in self._cut(pieces):
            staging = self._staging_buffer()
            if used + data.numel() > staging.numel():
                yield batch
                batch, used = [], 0
            batch.append((data, (staging[used : used + data.numel()], region, address)))
            used += data.numel()
        if batch:
            yield batch

    def _cut(self, pieces: list[RegionPiece]) -> Iterator[RegionPiece]:
        for data, region, address in pieces:
            for part in as_bytes(data).split(_STAGING_BYTES):
                yield part, region, address
                address += part.numel()

    def _staging_buffer(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = self._registered.add_staging()
        return self._staging
