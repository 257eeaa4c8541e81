"""One peer of the shm transport: its mapped regions, and a thread that reads its messages."""

from __future__ import annotations

import socket
import threading

import torch

from kvpool.transport import shm_wire
from kvpool.transport.base import MAX_MESSAGE_BYTES, Callbacks, RegionName
from kvpool.transport.memfd import Mapping
from kvpool.transport.shm_wire import Packet
from kvpool.transport.windowed import Windowed
from kvrelay.errors import PeerError


class ShmConnection(Windowed):
    def __init__(self, sock: socket.socket, peer_address: str, send_timeout_s: float) -> None:
        """Takes the socket over, once both sides have introduced themselves."""
        shm_wire.set_send_timeout(sock, send_timeout_s)
        self._socket = sock
        self._peer_address = peer_address
        self._send_timeout_s = send_timeout_s
        self._send_lock = threading.Lock()
        self._map_lock = threading.Lock()
        self._mappings: dict[RegionName, Mapping] = {}
        self._closed = False
        self._lost = False

    @property
    def peer_address(self) -> str:
        return self._peer_address

    def window(self, region: RegionName) -> torch.Tensor:
        """Mapped on first use; a region that was retired is unmapped here when that is seen."""
        with self._map_lock:
            if self._lost or self._closed:
                raise PeerError(f"{self._peer_address} is gone")
            mapping = self._mappings.get(region) or self._map(region)
            if mapping.retired:
                del self._mappings[region]
                raise PeerError(f"{self._peer_address} has retired region {region}")
            return mapping.memory

    def notify(self, payload: bytes) -> None:
        assert len(payload) <= MAX_MESSAGE_BYTES, len(payload)
        with self._send_lock:
            try:
                shm_wire.send(self._socket, Packet.MESSAGE, payload)
            except BlockingIOError as error:
                reason = f"{self._peer_address} has read nothing for {self._send_timeout_s} s"
                raise PeerError(reason) from error
            except OSError as error:
                raise PeerError(f"{self._peer_address} is gone: {error}") from error

    def close(self) -> None:
        self._closed = True
        shm_wire.shut_down(self._socket)

    def deliver(self, callbacks: Callbacks, *, accepted: bool) -> None:
        """Run by this connection's thread until either side closes or dies."""
        if accepted:
            callbacks.on_connect(self)
        while (payload := self._next_message()) is not None:
            callbacks.on_message(self, payload)
        self._end()
        if not self._closed:
            callbacks.on_lost(self)

    def _map(self, region: RegionName) -> Mapping:
        """Also drops mappings of regions that were retired meanwhile."""
        live = {name: m for name, m in self._mappings.items() if not m.retired}
        mapping = live[region] = shm_wire.fetch(self._peer_address, region)
        self._mappings = live
        return mapping

    def _next_message(self) -> bytes | None:
        """None at the end, once closed here, and for a peer that breaks the protocol."""
        try:
            received = shm_wire.receive(self._socket)
        except (OSError, PeerError):
            return None
        if received is None or received[0] is not Packet.MESSAGE or self._closed:
            return None
        return received[1]

    def _end(self) -> None:
        self._lost = True
        shm_wire.shut_down(self._socket)
        with self._send_lock:
            self._socket.close()
        with self._map_lock:
            self._mappings.clear()
