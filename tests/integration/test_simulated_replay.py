"""What a live router recorded, simulated: each prompt's KV is found in places of the same kind.

One request after another, on two hosts. Between them a pool node and a worker die.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import httpx

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config
from cluster.core.settings import host_pool_address
from cluster.sim.readers import recorded_requests
from cluster.sim.simulation import ClusterSimulation, Scale
from kvrelay.counters import Counters
from kvrelay.types import Incarnation, Role
from router.core.events import (
    Event,
    PoolNodeLost,
    PoolNodeSaid,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.record import Entry, from_line
from tests.access import HEADERS
from tests.integration.pool_kit import Node
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE

BLOCKS = 14
TOKENS = BLOCKS * 16 + 6
DEVICE_BLOCKS = 16
BLOCK_BYTES = 8192
MEMORY = "64MiB"
FAST = {
    "kind": "linear",
    "prefill_overhead_s": 0.001,
    "prefill_token_s": 0.0,
    "prefill_pair_s": 0.0,
    "decode_knots": [[1, 0.001], [256, 0.001]],
    "decode_kv_token_s": 0.0,
}
"""A simulated request has ended before the next one comes, as live."""
FIRST_S = 1.0
"""The first request comes so long after the simulation's beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Tokens of one prompt, by where prefill workers found their KV."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    peer: int = 0

    @classmethod
    def of(cls, counters: Sequence[Counters]) -> Places:
        return cls(
            device=sum(one.prefix_hit_tokens for one in counters),
            host=sum(one.pool_host_tokens for one in counters),
            disk=sum(one.pool_disk_tokens for one in counters),
            remote=sum(one.pool_remote_tokens for one in counters),
            peer=sum(one.peer_tokens for one in counters),
        )

    def since(self, before: Places) -> Places:
        return Places(
            device=self.device - before.device,
            host=self.host - before.host,
            disk=self.disk - before.disk,
            remote=self.remote - before.remote,
            peer=self.peer - before.peer,
        )


@dataclass(frozen=True, slots=True)
class Heard:
    at_s: float
    event: Event


def places(heard: Sequence[Heard]) -> list[Places]:
    """Of each request. The workers told of it before the next one came."""
    latest: dict[Incarnation, Counters] = {}
    prefilling: set[Incarnation] = set()
    totals: list[Places] = []
    for one in heard:
        match one.event:
            case WorkerJoined(hello=hello) if hello.role is Role.PREFILL:
                prefilling.add(hello.incarnation)
            case WorkerSaid(incarnation=worker, counters=counters) if worker in prefilling:
                latest[worker] = counters
            case Submitted():
                totals.append(Places.of([*latest.values()]))
    totals.append(Places.of([*latest.values()]))
    return [after.since(before) for before, after in pairwise(totals)]


# --- live ---------------------------------------------------------------------------------------


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(TOKENS)]


class Live:
    """Host A has prefill-0 and decode-0, host B has prefill-1."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._names = {host: f"replay-{host}-{uuid4().hex[:8]}" for host in "ab"}
        self.nodes = {host: self._node(host, 0) for host in "ab"}
        self._settings = {
            name: worker_settings(
                name,
                Role(name.split("-")[0]),
                model,
                pool_address=host_pool_address(self._names[host]),
                kv_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
                transports=("shm", "nixl"),
            )
            for name, host in (("prefill-0", "a"), ("decode-0", "a"), ("prefill-1", "b"))
        }

    def _node(self, host: str, life: int) -> Node:
        log = self._folder / f"{host}-{life}.log"
        disk = ("--disk", str(self._folder / f"disk-{host}"), "--disk-size", MEMORY)
        options = ("--host-memory", MEMORY, "--transport", "nixl", *disk)
        node = Node(log, self._names[host], *options)
        self._stack.callback(lambda: node.stop() if node.is_alive else None)
        return node

    def serve(self, model: Path, record: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
        doomed = self._stack.enter_context(WorkerHost())
        workers = [
            (doomed, self._settings["prefill-0"]),
            (hosts[1], self._settings["decode-0"]),
        ]
        recording = {"record": str(record), "record_bytes": 1 << 28}
        with running_cluster(model, workers, **recording) as cluster:
            for node in self.nodes.values():
                cluster.add_pool_node(node.grpc_address)
            wait_until(lambda: self.nodes["a"].text.count("joined") == 2, "both use the pool")
            self._ask(cluster, 1, blocks=BLOCKS)
            self._ask(cluster, 1, blocks=BLOCKS)
            self._ask(cluster, 2, blocks=2 * BLOCKS)
            self._ask(cluster, 1, blocks=2 * BLOCKS)
            self._node_dies(cluster)
            self._ask(cluster, 2, blocks=2 * BLOCKS)
            doomed.kill()
            wait_until(lambda: len(cluster.router.workers()) == 1, "the router has lost it")
            address = cluster.add(hosts[0], self._settings["prefill-1"])
            wait_until(lambda: "joined" in self.nodes["b"].text, "the next one uses its pool")
            self._ask(cluster, 1, blocks=3 * BLOCKS)
            hosts[0].stop(address)

    def _node_dies(self, cluster: Cluster) -> None:
        directory = cluster.router.process.dispatcher.core.state.directory
        self.nodes["a"].kill()
        wait_until(lambda: not directory.pool_nodes, "the router has lost the node")
        self.nodes["a"] = self._node("a", 1)
        cluster.add_pool_node(self.nodes["a"].grpc_address)
        wait_until(lambda: self.nodes["a"].text.count("joined") == 2, "both use the new node")
        wait_until(lambda: len(directory.pool_nodes) == 1, "the router hears it")

    def _ask(self, cluster: Cluster, seed: int, *, blocks: int) -> None:
        """Returns once as many blocks are on the hosts' disks."""
        cluster.completion(prompt(seed), max_tokens=4, temperature=0, ignore_eos=True)
        wait_until(lambda: on_disk(cluster) == blocks, f"{blocks} blocks are on disk")


def on_disk(cluster: Cluster) -> int:
    kv = httpx.get(f"{cluster.internal_url}/debug/kv", headers=HEADERS, timeout=60.0).json()
    tiers = [tier for node in kv["pool_nodes"] for tier in node["tiers"]]
    return sum(
        int(state.get("blocks", 0))
        for tier in tiers
        if tier["tier"] == "disk"
        for state in tier["states"]
        if state["state"] == "cached"
    )


# --- simulated ----------------------------------------------------------------------------------


def simulated(entries: Sequence[Entry], model: Path, record: Path) -> list[Heard]:
    """What the router of the simulation heard."""
    (origin_s, *_) = (one.at_s - FIRST_S for one in entries if isinstance(one.event, Submitted))
    with record.open() as lines:
        requests = [
            replace(request, arrival_s=request.arrival_s - origin_s)
            for _, request in recorded_requests(str(record), enumerate(lines, 1))
        ]
    simulation = ClusterSimulation(cluster_file(entries, model, origin_s), requests, Scale())
    (router,) = simulation.routers
    heard, hear = [], router.hear

    def listen(event: Event) -> None:
        heard.append(Heard(simulation.clock.now_s, event))
        hear(event)

    router.hear = listen  # type: ignore[method-assign]
    joined = [WorkerJoined(hello=worker.hello) for worker in simulation.fleet.workers.values()]
    outcomes = simulation.run().outcomes
    assert all(one.done for one in outcomes), outcomes
    return [*(Heard(0.0, one) for one in joined), *heard]


def cluster_file(entries: Sequence[Entry], model: Path, origin_s: float) -> Config:
    """The live cluster, and who died in it. The second prefill worker comes late."""
    shape = json.loads((model / "config.json").read_text())
    kv = {
        "layers": shape["num_hidden_layers"],
        "heads": shape["num_key_value_heads"],
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        "dtype": "float32",
    }
    settings = {
        "workers": [{"role": "prefill"}, {"role": "decode"}, {"role": "prefill"}],
        "scheduler.prefill_chunk_tokens": 64,
        "router.placement.local_prefill": "off",
        "pool.host_memory": MEMORY,
        "pool.disk": "/not/used",
        "pool.disk_size": MEMORY,
        "simulation.profile": FAST,
        "simulation.block_size": 16,
        "simulation.blocks": DEVICE_BLOCKS,
        "simulation.host.workers": 2,
        "simulation.kv": kv,
        "simulation.slo.told": False,
        "simulation.failures": [*deaths(entries, origin_s)],
    }
    texts = (f"{key}={json.dumps(value)}" for key, value in settings.items())
    return load_config(None, map(Override.parse, texts))


def deaths(entries: Sequence[Entry], origin_s: float) -> Iterator[dict[str, str]]:
    """As the router noticed them."""

    def at_s(kind: type, place: int) -> float:
        return [one.at_s - origin_s for one in entries if isinstance(one.event, kind)][place]

    died_s = at_s(WorkerLost, 0)
    between_s = (died_s + at_s(WorkerJoined, 2)) / 2
    yield {"worker": "prefill2-0", "at": "1ms", "back_after": f"{between_s:.6f}s"}
    yield {"worker": "prefill-0", "at": f"{died_s:.6f}s"}
    lost_s = at_s(PoolNodeLost, 0)
    back_s = next(
        one.at_s - origin_s
        for one in entries
        if isinstance(one.event, PoolNodeSaid) and one.at_s - origin_s > lost_s
    )
    yield {"pool_node": "pool-0", "at": f"{lost_s:.6f}s", "back_after": f"{back_s - lost_s:.6f}s"}


def test_a_simulated_replay_finds_kv_in_the_same_kinds_of_places(
    tmp_path: Path, llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    record = tmp_path / "record.jsonl"
    with ExitStack() as stack:
        Live(tmp_path, llama, stack).serve(llama, record, hosts)
    _, *lines = map(from_line, record.read_text().splitlines())
    entries = [one for one in lines if isinstance(one, Entry)]
    found = places([Heard(one.at_s, one.event) for one in entries])
    whole = BLOCKS * 16
    assert found == [
        Places(),
        Places(device=whole),
        Places(),
        Places(device=16, host=whole - 16),
        Places(device=16, disk=whole - 16),
        Places(remote=whole),
    ]
    assert places(simulated(entries, llama, record)) == found
