"""What is left when all streams have ended: blocks, leases, descriptors, memory, processes."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.chaos.clusters.plain import ChaosCluster, kv_of
from bench.chaos.clusters.processes import Process, Processes, marked_processes
from cluster.process.witness import LINGER_S
from kvrelay.v1.admin_pb2 import GetKvResponse
from kvrelay.v1.pool_node_pb2 import PoolReport
from kvrelay.v1.worker_pb2 import DebugKvResponse

SPARE_DESCRIPTORS = 12
"""A process may have so many more than when it was idle before: connections that are open still."""
SPARE_SHARED = 1.02
SPARE_S = 5.0
IDLE_POOL_STATES = ("free", "cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one process. `shared`: bytes of each region of shared memory that it has mapped."""

    descriptors: int
    resident_bytes: int
    shared: Mapping[int, int]
    kinds: Mapping[str, int]


def footprint(process: Process) -> Footprint:
    links = [*_links(process.pid)]
    return Footprint(
        descriptors=len(links),
        resident_bytes=process.resident_bytes(),
        shared=_shared(process.pid),
        kinds=Counter(_kind(link) for _, link in links),
    )


def footprints(processes: Iterable[Process]) -> dict[str, Footprint]:
    return {one.name: footprint(one) for one in processes if one.runs}


def _links(pid: int) -> Iterable[tuple[str, str]]:
    folder = Path(f"/proc/{pid}/fd")
    for entry in os.listdir(folder):
        with suppress(OSError):
            yield str(folder / entry), os.readlink(folder / entry)


def _kind(link: str) -> str:
    return re.sub(r"[0-9]+", "", link.split(":")[0] if ":" in link else "file")


_MAPPED = re.compile(r"^(\w+)-(\w+) \S+ \S+ \S+ (\d+)\s+(/memfd:kvrelay|/dev/shm/)")


def _shared(pid: int) -> dict[int, int]:
    """# inode |-> bytes, of mapped memfds and files in /dev/shm"""
    found: dict[int, int] = Counter()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if match := _MAPPED.match(line):
            begin, end, inode, _ = match.groups()
            found[int(inode)] += int(end, 16) - int(begin, 16)
    return found


def shared_bytes(prints: Mapping[str, Footprint]) -> int:
    """Each region once."""
    regions: dict[int, int] = {}
    for one in prints.values():
        for inode, size in one.shared.items():
            regions[inode] = max(size, regions.get(inode, 0))
    return sum(regions.values())


def grown(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[str]:
    found = []
    for name, now in after.items():
        more = now.descriptors - before[name].descriptors
        if more > SPARE_DESCRIPTORS:
            kinds = Counter(now.kinds)
            kinds.subtract(before[name].kinds)
            what = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common() if n > 0)
            found.append(f"{name} has {more} descriptors more: {what}")
    was, now_bytes = shared_bytes(before), shared_bytes(after)
    if now_bytes > SPARE_SHARED * was:
        found.append(f"shared memory: {now_bytes / 2**20:.0f} MiB, {was / 2**20:.0f} before")
    return found


async def until_nothing_is_held(cluster: ChaosCluster, patience_s: float) -> list[str]:
    """What every router is told of held blocks, leases and slabs after this time; empty: none."""
    deadline_s = time.monotonic() + patience_s
    while (held := await _held(cluster)) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
    return held


async def _held(cluster: ChaosCluster) -> list[str]:
    found: list[str] = []
    for internal in cluster.internal:
        try:
            found += held_in(await kv_of(internal))
        except grpc.RpcError as error:
            found.append(f"router {internal} does not answer: {error!r}")
    return [*dict.fromkeys(found)]


def held_in(report: GetKvResponse) -> list[str]:
    found = [f"{one.address} does not answer: {one.error}" for one in report.silent]
    for worker in report.workers:
        found += _held_by_worker(worker)
    for node in report.pool_nodes:
        found += _held_by_node(node)
    return found


def _held_by_worker(worker: DebugKvResponse) -> list[str]:
    found = [
        f"{worker.worker}: {len(one.block_ids)} blocks {one.state} for {one.holder}"
        for one in worker.held
    ]
    found += [
        f"{worker.worker}: slab {one.slab_id} {one.state} for {one.holder}"
        for one in worker.slabs
        if one.holder
    ]
    counts = {"leased": worker.leased_blocks, "orphaned": worker.orphaned_blocks}
    found += [f"{worker.worker}: {n} blocks {state}" for state, n in counts.items() if n]
    if worker.free_blocks + worker.cached_blocks != worker.total_blocks:
        missing = worker.total_blocks - worker.free_blocks - worker.cached_blocks
        found.append(f"{worker.worker}: {missing} blocks neither free nor cached")
    return found


def _held_by_node(node: PoolReport) -> list[str]:
    found = [f"{node.name}: {one.blocks} blocks {one.state} for {one.worker}" for one in node.held]
    if node.orphaned_blocks:
        found.append(f"{node.name}: {node.orphaned_blocks} blocks orphaned")
    for tier in node.tiers:
        found += [
            f"{node.name}: {one.blocks} blocks {one.state} in {tier.tier}"
            for one in tier.states
            if one.blocks and one.state not in IDLE_POOL_STATES
        ]
    return found


async def left_over(supervisor: Processes, dev_shm: Sequence[str]) -> list[str]:
    """After everything was ended, and the witnesses of killed workers too: processes, sockets with
    a name, and files in /dev/shm."""
    deadline_s = time.monotonic() + LINGER_S + SPARE_S
    while (alive := marked_processes(supervisor.mark)) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.2)
    found = [f"process {one.pid}: {' '.join(one.cmdline())}" for one in alive]
    found += [f"/dev/shm/{name}" for name in sorted({*files_in_shm()} - {*dev_shm})]
    return found


def files_in_shm() -> list[str]:
    return os.listdir("/dev/shm")
