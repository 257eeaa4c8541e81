"""The process of a rank other than the first: loads its share, then runs the steps of rank 0.

`leader` starts it as `python -m engine.follower DESCRIPTOR`; it ends when that connection ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits, MemoryProfile
from engine.core.step import SequenceSlice
from engine.device.threads import use_threads
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.parallel.channel import Channel
from engine.parallel.grid import Grid
from engine.parallel.message import StepHearer, StepKind
from engine.parallel.opening import OwnRank, open_rank
from engine.parallel.ranks import lies_apart, offer_part, pool_map
from engine.runner import Engine
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import Allocate, KvMemory
from kvrelay.errors import ModelError, PeerError

T = TypeVar("T")

log = logging.getLogger(__name__)


class Following:
    """This rank's side of the connection."""

    def __init__(self, channel: Channel, own: OwnRank) -> None:
        self.own = own
        self._channel = channel

    def together(self, work: Callable[[], T]) -> T:
        done = work()
        self._channel.send_facts(done=True)
        self._channel.receive_facts()  # all have done it
        self.own.connect(None if self.own.group is None else self._channel.receive_memory())
        return done

    def profiles(self, own: MemoryProfile) -> tuple[MemoryProfile, ...]:
        self._channel.send_facts(**asdict(own))
        return ()

    def memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        blocks = self._channel.receive_facts()["blocks"]
        grid, rank, apart = self.own.grid, self.own.rank, lies_apart(device)
        pool = pool_map(layout, blocks, grid, apart=apart)
        if apart:
            return offer_part(pool.parts[rank], device, self._channel)
        return KvMemory.over(pool, self._channel.receive_memory()).parts[grid.tensor_rank(rank)]

    def tell(self, slices: Sequence[SequenceSlice], kind: StepKind) -> None:
        pass

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        pass

    def close(self) -> None:
        self._channel.close()


def load_followed(channel: Channel) -> Engine:
    """Loads by rank 0's orders. Raises ModelError."""
    orders: dict[str, Any] = channel.receive_facts()
    use_threads(orders["threads"])
    device, meeting = orders["device"], Path(orders["meeting"])
    grid = Grid(tensor=orders["tensor"], stages=orders["stages"])
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)  # nothing of this rank belongs on rank 0's
    own = open_rank(device, orders["rank"], grid, meeting)
    engine = load_engine(
        open_checkpoint(orders["path"]),
        device=device,
        dtype=orders["dtype"],
        block_size=orders["block_size"],
        blocks=orders["blocks"],
        limits=EngineLimits(**orders["limits"]),
        attention=orders["attention"],
        cuda=CudaOptions(**orders["cuda"]),
        compiled=orders["compiled"],
        ranks=Following(channel, own),
    )
    own.bound(orders["timeout_s"])
    return engine


def follow(channel: Channel) -> None:
    engine, hearer = load_followed(channel), StepHearer()
    channel.send_facts(done=True)
    while True:
        engine.follow(*hearer.decode(channel.receive()))


def _end_with(channel: Channel) -> None:
    """Ends this process, whatever it does: rank 0 is gone or no longer needs it."""
    channel.wait_end()
    os._exit(0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    try:
        follow(channel)
    except EOFError:
        pass
    except Exception as error:
        if not isinstance(error, ModelError | PeerError):  # rank 0 says these
            log.exception("this rank ends after an error")
        follows = isinstance(error, PeerError)
        channel.send_facts(error=" ".join(str(error).split()), follows=follows)
        os._exit(1)  # groups may have work that another rank would have to end


if __name__ == "__main__":
    main()
