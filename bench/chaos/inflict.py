"""Makes faults, one every few seconds, and ends those that last."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.chaos.clusters.host import MemoryGroup, SmallDisk, listening_ports
from bench.chaos.clusters.plain import ChaosCluster
from bench.chaos.clusters.processes import Process
from bench.chaos.faults import Fault, Kind, Seen, drawn, possible
from bench.chaos.streams import Load

DISTURBED_S = 15.0
"""How long a link, a disk or a memory limit stays as it is."""
LIMIT_BYTES = 2**20


@dataclass(slots=True, kw_only=True)
class Inflictor:
    """`disk`, `memory` None: not on this machine."""

    cluster: ChaosCluster
    load: Load
    streams: int
    disk: SmallDisk | None
    memory: MemoryGroup | None
    only: Sequence[str] = ()
    tell: Callable[[str], None] = print
    seen: list[Seen] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    topped_up: int = 0
    _lasting: set[asyncio.Task[None]] = field(default_factory=set)
    _busy: set[str] = field(default_factory=set)

    async def run(self, rng: Random, *, every_s: float, seconds: float) -> None:
        began_s = time.monotonic()
        for number in range(1, int(seconds / every_s) + 1):
            await asyncio.sleep(max(0.0, began_s + number * every_s - time.monotonic()))
            self.topped_up += self.load.fill_up(self.streams)
            fault = drawn(self._candidates(), rng)
            if fault is None:
                self.tell(f"{time.monotonic() - began_s:6.1f} s  no fault is possible now")
                continue
            await self._make(fault, began_s)

    async def end(self) -> None:
        """All that was stopped goes on."""
        for task in self._lasting:
            task.cancel()
        await asyncio.gather(*self._lasting, return_exceptions=True)

    def _candidates(self) -> list[Fault]:
        found = possible(self.cluster.roles, self.cluster.serving, self._of_the_host())
        free = [one for one in found if one.target not in self._busy]
        return [one for one in free if not self.only or any(o in str(one) for o in self.only)]

    def _of_the_host(self) -> list[Fault]:
        found: list[Fault] = []
        if (second := self.cluster.shape.second_host) is not None:
            kinds = [Kind.BLACK_HOLE, *([Kind.LOSSY] if second.is_lossy_possible else [])]
            found += [Fault(kind=k, role="link", target="link") for k in kinds]
        if self.disk is not None:
            found.append(Fault(kind=Kind.DISK_FULL, role="pool", target="disk"))
        if self.memory is not None:
            found.append(Fault(kind=Kind.MEMORY, role="pool", target="pool-0"))
        return found

    async def _make(self, fault: Fault, began_s: float) -> None:
        begun = {one.number for one in self.load.live if one.came_s}
        self.live.append(len(self.load.live))
        on_it = frozenset(await self._served_by(fault) & begun)
        at_s, in_force = time.monotonic(), len(self._lasting)
        lasts_s = self._begin(fault)
        self.tell(
            f"{at_s - began_s:6.1f} s  {fault}, {len(self.load.live)} live streams, "
            f"{len(on_it)} on it, {in_force} other faults in force"
        )
        seen = Seen(
            fault=fault,
            at_s=at_s,
            until_s=at_s + lasts_s,
            live=frozenset(begun),
            on_it=on_it,
            in_force=in_force,
        )
        self.seen.append(seen)

    async def _served_by(self, fault: Fault) -> set[int]:
        """The numbers of the streams that this router or worker serves."""
        process = self.cluster.supervisor.processes.get(fault.target)
        if process is None or process.role in ("pool", "controller"):
            return set()
        if process.role == "router":
            number = int(process.name.rpartition("-")[2])
            return {one.number for one in self.load.live if one.router == number}
        held = await self.cluster.held_by(process)
        if held is None:
            self.tell(f"{process.name} does not say at once what it serves")
            return set()
        return {one.number for one in self.load.live if _is_held(one.request_id, held)}

    def _begin(self, fault: Fault) -> float:
        """Returns how long it lasts."""
        process = self.cluster.supervisor.processes.get(fault.target)
        if fault.kind is Kind.KILL and process is not None:
            process.signal(signal.SIGKILL)
            return 0.0
        if fault.kind is Kind.STOP and process is not None:
            process.signal(signal.SIGSTOP)
            self._last(fault, fault.duration_s, lambda: process.signal(signal.SIGCONT))
            return fault.duration_s
        self._last(fault, DISTURBED_S, self._disturb(fault, process))
        return DISTURBED_S

    def _disturb(self, fault: Fault, process: Process | None) -> Callable[[], object]:
        """Begins it; returns what ends it."""
        second = self.cluster.shape.second_host
        if fault.kind is Kind.DISK_FULL and self.disk is not None:
            self.disk.fill()
            return self.disk.free
        if fault.kind is Kind.MEMORY and self.memory is not None and process is not None:
            process.killed = True
            self.memory.take(process.pid)
            self.memory.limit(LIMIT_BYTES)
            return self.memory.lift
        assert second is not None
        if fault.kind is Kind.LOSSY:
            second.lose()
        else:
            second.swallow(*self._data_ports())
        return second.heal

    def _data_ports(self) -> tuple[list[int], list[int]]:
        """Of the processes there, and of those here: all ports but those of gRPC."""
        far, near = set[int](), set[int]()
        for process in self.cluster.supervisor.of_role("prefill", "decode", "pool"):
            if process.serves:
                own = int(process.address().rpartition(":")[2])
                side = far if self.cluster.is_far(process.name) else near
                side |= listening_ports(process.pid) - {own}
        return sorted(far), sorted(near)

    def _last(self, fault: Fault, seconds: float, end: Callable[[], object]) -> None:
        async def lasting() -> None:
            self._busy.add(fault.target)
            try:
                await asyncio.sleep(seconds)
            finally:
                end()
                self._busy.discard(fault.target)

        task = asyncio.create_task(lasting())
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)


def _is_held(request_id: str, held: Sequence[str]) -> bool:
    """The router lengthens ids."""
    return any(f"{request_id}-" in f"{one}-" for one in held)
