"""Rank 0's side of a worker's ranks: starts the others, sends them each step, ends with them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.core.sizing import MemoryProfile
from engine.core.step import SequenceSlice
from engine.parallel.channel import Channel
from engine.parallel.grid import Grid
from engine.parallel.message import StepKind, StepTeller
from engine.parallel.opening import open_rank
from engine.parallel.ranks import lies_apart, map_parts, pool_map
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import Allocate, KvMemory
from kvpool.transport.mapped import memfd
from kvrelay.errors import ModelError, PeerError

T = TypeVar("T")

_PATIENCE_S = 5.0


class Leader:
    """The other ranks are child processes, which end when this one ends, however it ends."""

    def __init__(
        self,
        grid: Grid,
        devices: Sequence[str],
        threads: int,
        orders: dict[str, Any],
        timeout_s: float,
    ) -> None:
        """`devices` are those of the ranks, `orders` the followers' load orders, as `load_followed`
        takes them; `threads` is the number for each. A rank that is waited for longer than
        `timeout_s` in a step is lost."""
        self._on_cpus = devices[0] == "cpu"
        self._folder = Path(tempfile.mkdtemp(prefix=f"kvrelay-ranks-{os.getpid()}-"))
        try:
            self.own = open_rank(devices[0], 0, grid, self._folder)
            self._followers = _started(devices, threads)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._orders = orders | {"tensor": grid.tensor, "stages": grid.stages, "threads": threads}
        self._orders |= {"meeting": str(self._folder), "timeout_s": timeout_s}
        self._timeout_s = timeout_s
        self._teller = StepTeller()
        self._closing = False
        self._ending = threading.Lock()
        self._lost: Future[PeerError] = Future()
        self._loans: list[memfd.Loan] = []
        for one in self._followers:
            threading.Thread(
                target=self._watch, args=(one,), name="kvrelay-ranks", daemon=True
            ).start()

    def together(self, work: Callable[[], T]) -> T:
        """Raises ModelError or PeerError when another rank can't do its part."""
        for one in self._followers:
            one.order(self._orders)
        done = work()
        for one in self._followers:
            one.hear()
        for one in self._followers:
            one.channel.send_facts(meet=True)
        self.own.connect(self._give_boards())
        if self._on_cpus:  # NCCL needs it as long as there are groups
            shutil.rmtree(self._folder, ignore_errors=True)
        return done

    def _give_boards(self) -> torch.Tensor | None:
        """Each stage's ranks share one. Returns that of this rank."""
        if self.own.group is None:
            return None
        size, grid = self.own.group.shared_bytes, self.own.grid
        boards = [memfd.allocate(size, "kvrelay-board") for _ in range(grid.stages)]
        for one in self._followers:
            one.channel.send_memory(self._lend(boards[grid.stage(one.rank)]))
        return boards[-1]

    def profiles(self, own: MemoryProfile) -> tuple[MemoryProfile, ...]:
        """Raises ModelError or PeerError when another rank can't measure."""
        return (own, *(MemoryProfile(**one.hear()) for one in self._followers))

    def memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        """The KV pool with each rank's part. Raises PeerError when a rank is gone."""
        try:
            return self._memory(layout, blocks, device, allocate)
        except (OSError, EOFError) as error:
            raise PeerError("a rank is gone") from error

    def _memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        grid, channels = self.own.grid, [one.channel for one in self._followers]
        for channel in channels:
            channel.send_facts(blocks=blocks)
        if lies_apart(device):
            for one in self._followers:
                one.hear()
            return map_parts(pool_map(layout, blocks, grid, apart=True), device, channels)
        memory = KvMemory(layout, blocks, device, allocate or memfd.allocate, ranks=grid.tensor)
        for channel in channels:
            channel.send_memory(self._lend(memory.flat))
        return memory

    def wait_ready(self) -> None:
        """All ranks can run steps: from now on none waits long for another. Raises ModelError or
        PeerError."""
        for one in self._followers:
            one.hear()
            one.channel.bound(self._timeout_s)
        self.own.bound(self._timeout_s)

    def _lend(self, memory: torch.Tensor) -> memfd.Loan:
        """Kept, with its memory, until the others have ended."""
        self._loans.append(memfd.lend(memory))
        return self._loans[-1]

    def tell(self, slices: Sequence[SequenceSlice], kind: StepKind) -> None:
        """Raises PeerError when a rank is gone."""
        message = self._teller.encode(slices, kind)
        for one in self._followers:
            try:
                one.channel.send(message)
            except OSError as error:
                raise PeerError(one.obituary()) from error

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """`lost` is called on a thread when a rank ends by itself; then no rank is left."""
        self._lost.add_done_callback(lambda lost_one: lost(lost_one.result()))

    @property
    def has_lost(self) -> bool:
        """A rank has ended by itself."""
        return self._lost.done()

    def last_words(self) -> str | None:
        """The error with which a follower has ended, if one has: rather one of its own than one
        that followed from another's end."""
        found = [words for one in self._followers if (words := one.last_words())]
        own = [words for words in found if not words.follows]
        return next((words.error for words in [*own, *found]), None)

    def close(self) -> None:
        """Ends the other ranks; idempotent."""
        with self._ending:
            self._closing = True
        for one in self._followers:
            one.end()
        self.own.close()
        self._loans.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, one: _Follower) -> None:
        one.channel.wait_end()
        with self._ending:
            if self._closing:
                return
            self._closing = True
        for other in self._followers:
            if other is not one:
                other.process.kill()  # ends the waiting of others over gloo
        self._lost.set_result(PeerError(one.obituary()))
        # Only now: a step that NCCL gives up ends as if it had its sums and hidden states. On a
        # thread, because NCCL may wait there for graphs that have its sums.
        threading.Thread(target=self.own.give_up, daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """`follows`: it ended because another rank had."""

    error: str
    follows: bool


class _Follower:
    def __init__(self, rank: int, device: str, threads: int) -> None:
        self.rank = rank
        self._device = device
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as unused:
            unused.callback(ours.close)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": str(threads),
                },
            )
            unused.pop_all()
        self.channel = Channel(ours)
        self._words: _Words | None = None

    def order(self, orders: dict[str, Any]) -> None:
        """Lets the rank load. Raises ModelError when it is gone."""
        with self._gone():
            self.channel.send_facts(rank=self.rank, device=self._device, **orders)

    def hear(self) -> dict[str, Any]:
        """What the rank says when it has done its part. Raises ModelError when it can't, PeerError
        when it couldn't because another one has ended."""
        with self._gone():
            facts = self.channel.receive_facts()
        if "error" in facts:
            self._words = _Words(**facts)
            raise (PeerError if self._words.follows else ModelError)(self._words.error)
        return facts

    @contextmanager
    def _gone(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise ModelError(f"{self.obituary()} while it loaded the model") from error

    def last_words(self) -> _Words | None:
        if self._words is not None:
            return self._words
        try:
            self.process.wait(_PATIENCE_S)
            facts = self.channel.receive_facts()
        except (subprocess.TimeoutExpired, OSError, EOFError):
            return None
        return _Words(**facts) if "error" in facts else None

    def obituary(self) -> str:
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} does not answer"
        return f"rank {self.rank} has ended with exit code {code}"

    def end(self) -> None:
        """The process has nothing to clean up."""
        self.process.kill()
        self.process.wait()
        self.channel.shut()
        self.channel.close()


def _started(devices: Sequence[str], threads: int) -> list[_Follower]:
    """Starts all of them or none."""
    started: list[_Follower] = []
    try:
        for rank, device in enumerate(devices[1:], start=1):
            started.append(_Follower(rank, device, threads))
    except BaseException:
        for one in started:
            one.end()
        raise
    return started
