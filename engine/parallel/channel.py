"""The connection between rank 0 and another rank: messages in order, until either process ends."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from kvpool.transport.mapped.memfd import Loan, Mapping, MemfdPlace

_LENGTH_BYTES = 8
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


class Channel:
    """One end. Sends and receives raise OSError or EOFError once the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def bound(self, timeout_s: float) -> None:
        """A send ends with OSError when the other end accepts nothing for this long."""
        whole = int(timeout_s)
        limit = _TIMEVAL.pack(whole, int(1e6 * (timeout_s - whole)))
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, payload: bytes) -> None:
        self._end.sendall(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)

    def receive(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(_LENGTH_BYTES), "little"))

    def send_facts(self, **facts: Any) -> None:
        self.send(json.dumps(facts).encode())

    def receive_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.receive())
        return facts

    def send_memory(self, loan: Loan) -> None:
        self.send_facts(**asdict(loan.place))
        socket.send_fds(self._end, [b"m"], [loan.fd])

    def receive_memory(self) -> torch.Tensor:
        """The memory that the other end lends, uint8 `[bytes]`; mapped as long as a tensor uses
        it."""
        place = MemfdPlace(**self.receive_facts())
        _, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        if not descriptors:
            raise EOFError("the other rank is gone")
        try:
            return Mapping(descriptors[0], place).memory
        finally:
            os.close(descriptors[0])

    def wait_end(self) -> None:
        """Returns once the other end is gone, or this one closed; reads no message."""
        watch = select.poll()
        watch.register(self._end, select.POLLRDHUP)
        watch.poll()

    def close(self) -> None:
        self._end.close()

    def shut(self) -> None:
        """Wakes waiting calls at both ends."""
        with suppress(OSError):  # the other end is gone already
            self._end.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            piece = self._end.recv(count - len(parts))
            if not piece:
                raise EOFError("the other rank is gone")
            parts += piece
        return bytes(parts)
