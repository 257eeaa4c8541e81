"""Who waits for whom: said when a simulated cluster stands still with requests in it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.cluster import Cluster
from tests.sim.worker import Worker


def who_waits(cluster: Cluster) -> str:
    lines = [
        f"{router.incarnation}: {key} is {request.state}"
        for router in cluster.routers.values()
        for key, request in router.core.state.requests.items()
    ]
    for worker in cluster.workers.values():
        lines += [f"{worker.incarnation}: {line}" for line in _of_worker(worker)]
    for host in cluster.pools.hosts.values():
        if host.node is not None:
            lines.append(f"{host.node.incarnation}: {host.node.core.books.counts()}")
    return "\n".join(["nothing happens any more, and these wait:", *lines])


def _of_worker(worker: Worker) -> Iterator[str]:
    tables, batch, reservations = worker.tables, worker.decode.batch, worker.decode.reservations
    yield f"{tables.free_blocks} of {tables.blocks} blocks to be had"
    yield from (f"{held.holder} holds {held.tables}" for held in tables.held())
    for job in worker.prefill.queue.awaiting_prefill.values():
        yield f"{job.key} waits for prefill, {_prefix(worker, job.holder)}"
    for sequence in batch.running_set.awaiting_prefill:
        yield f"{sequence.holder} waits to be computed, {_prefix(worker, sequence.holder)}"
    yield f"slabs {reservations.slabs.counts()}, {reservations.choices} choices reserved"
    if worker.pool is not None:
        yield f"pool: link {worker.pool.link}, idle {worker.pool.stores.idle}"


def _prefix(worker: Worker, holder: object) -> str:
    waits = worker.core.lookup.is_fetching(holder)  # type: ignore[arg-type]
    return "with its prefix on its way" if waits else "with no prefix on its way"
