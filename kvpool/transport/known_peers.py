"""What an endpoint reaches of its peers' memory: one for each, whatever connections it has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.transport.exposure import PeerMemory


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    users: int = 0  # connections
    met: int = 0  # how many there have been


class KnownPeers:
    """# address |-> its memory, made by `reach` when the first connection uses it. Thread safe."""

    def __init__(self, reach: Callable[[str], PeerMemory]) -> None:
        self._reach = reach
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def __getitem__(self, address: str) -> PeerMemory:
        """Of a peer in use."""
        return self._peers[address].memory

    def use(self, address: str) -> PeerMemory:
        """For one connection more, until it leaves."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(self._reach(address))
            peer.users += 1
            peer.met += 1
            return peer.memory

    def leave(self, address: str) -> None:
        """Peers that no connection uses rest. Not under the lock: a peer's memory may wait for the
        peer."""
        with self._lock:
            self._peers[address].users -= 1
            resting = [(a, peer, peer.met) for a, peer in self._peers.items() if not peer.users]
        for other, peer, met in resting:
            forgettable = peer.memory.rest()
            with self._lock:
                if forgettable and peer.met == met and self._peers.get(other) is peer:
                    del self._peers[other]
