"""Between processes of one host (Linux): regions are memfds that the peer maps."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence

import torch

from kvpool.transport.mapped import memfd, windowed
from kvpool.transport.mapped.memfd import Loan, Mapping, MemfdPlace
from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvpool.transport.peer.control_wire import Grant
from kvpool.transport.peer.exposure import Check, FetchGrant
from kvrelay.errors import PeerError

_PLACE = struct.Struct("<QQQI")  # bytes made, offset, bytes, loan


class ShmExposure:
    """Adopts memory of `memfd.allocate` only."""

    staging_bytes = 0

    def __init__(self) -> None:
        self._loans: dict[RegionName, Loan] = {}

    def allocate(self, nbytes: int, name: RegionName) -> torch.Tensor:
        return memfd.allocate(nbytes, name)

    def expose(self, name: RegionName, memory: torch.Tensor) -> None:
        self._loans[name] = memfd.lend(memory)

    def grant(self, name: RegionName, peer: socket.socket) -> Grant:
        loan = self._loans[name]
        at = loan.place
        return Grant(payload=_PLACE.pack(at.made_bytes, at.offset, at.nbytes, at.loan), fd=loan.fd)

    def retire(self, name: RegionName) -> None:
        """The mappings of peers keep the memory itself."""
        self._loans.pop(name).retire()

    def free(self, name: RegionName) -> None:
        pass  # with its last mapping

    def peer(self, address: str, fetch: FetchGrant) -> ShmPeer:
        return ShmPeer(address, fetch)

    def give_up(self) -> None:
        pass  # copies of mapped memory end by themselves

    def close(self) -> None:
        pass  # every region has been retired


class ShmPeer:
    def __init__(self, address: str, fetch: FetchGrant) -> None:
        self._address = address
        self._fetch = fetch
        self._lock = threading.Lock()
        self._mappings: dict[RegionName, Mapping] = {}

    def write(self, writes: Sequence[RegionWrite], check: Check) -> None:
        windowed.write(lambda region: self.window(region, check), writes)

    def read(self, reads: Sequence[Read], check: Check) -> None:
        windowed.read(lambda region: self.window(region, check), reads)

    def window(self, region: RegionName, check: Check) -> torch.Tensor:
        """Mapped on first use; a retired region is unmapped here when that is noticed."""
        with self._lock:
            check()
            mapping = self._mappings.get(region)
            if mapping is None:
                mapping = self._mappings[region] = _mapped(self._fetch(region))
            if mapping.retired:
                del self._mappings[region]
                raise PeerError(f"{self._address} has retired region {region}")
            return mapping.memory

    def retire(self, region: RegionName) -> None:
        """Running writes do no harm: the memory exists as long as a process maps it."""
        with self._lock:
            self._mappings.pop(region, None)

    def drain(self) -> None:
        pass

    def rest(self, patience_s: float) -> bool:
        with self._lock:
            self._mappings.clear()
        return True


def _mapped(grant: Grant) -> Mapping:
    if grant.fd is None:
        raise PeerError("the peer granted a region without its memory")
    try:
        if len(grant.payload) != _PLACE.size:
            raise PeerError(f"the peer granted a region in {len(grant.payload)} bytes")
        made_bytes, offset, nbytes, loan = _PLACE.unpack(grant.payload)
        place = MemfdPlace(made_bytes=made_bytes, offset=offset, nbytes=nbytes, loan=loan)
        return Mapping(grant.fd, place)
    finally:
        os.close(grant.fd)
