"""Pool nodes of simulated clusters: where KV is found, what it takes, and deaths at any moment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config
from cluster.config.simulation import FabricSection, HostSection
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.host import HostMemory, SimHost
from cluster.sim.machines.links import Fabric
from cluster.sim.machines.node_links import SimNodeLinks
from cluster.sim.machines.pool_disk import SimPoolDisk
from cluster.sim.machines.pool_node import SimPoolNode
from cluster.sim.results.output import Result, as_json, simulate
from cluster.sim.results.report import KvPoolUse
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import TraceRequest
from kvpool.core.fetch.client_events import FetchBlocks, StoreBlocks
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.events import (
    BlockLoad,
    ReadSlots,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    Spill,
    WriteSlots,
)
from kvpool.core.node.messages import PoolFormat
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation
from router.core.request import MAX_ATTEMPTS
from router.core.state.story import Moment

PLAIN = (
    "workers.0.replicas=1",
    "workers.1.replicas=1",
    "simulation.block_size=512",
    "simulation.slo.told=false",
)
POOL = (*PLAIN, "pool.enabled=on", "pool.host_memory=4GiB")
PREFILL_TOKEN_S = 1e-4
LINEAR = {
    "kind": "linear",
    "prefill_overhead_s": 0.01,
    "prefill_token_s": PREFILL_TOKEN_S,
    "prefill_pair_s": 0.0,
    "decode_knots": [[1, 0.01], [256, 0.01]],
    "decode_kv_token_s": 0.0,
}
BLOCK_BYTES = 512 * 128 * 1024
FAR = Incarnation("far")
GIB = 1 << 30


def run(requests: list[TraceRequest], *settings: str) -> Result:
    return simulate(load_config(None, map(Override.parse, settings)), requests, Scale())


def pool_of(result: Result) -> KvPoolUse:
    assert result.report.kv_pool is not None
    return result.report.kv_pool


def asks(*prompts: tuple[int, int], every_s: float = 20.0) -> list[TraceRequest]:
    """Each is (name, blocks). Equal names, equal prompts; 400 tokens more are like no others."""
    return [
        TraceRequest(
            arrival_s=number * every_s,
            input_tokens=blocks * 512 + 400,
            output_tokens=2,
            hash_ids=(*(name * 1000 + i for i in range(blocks)), 10**6 + number),
        )
        for number, (name, blocks) in enumerate(prompts)
    ]


EVICTED = asks((1, 16), (2, 23), (1, 16))
"""The second prompt drives the first out of a device of 24 blocks."""
SMALL = (
    *POOL,
    "simulation.blocks=24",
    f"simulation.profile={json.dumps(LINEAR)}",
    "scheduler.prefill_chunk_tokens=65536",
)


def last_ttft_s(result: Result) -> float:
    ttft_s = result.outcomes[-1].ttft_s
    assert ttft_s is not None and all(one.done for one in result.outcomes)
    return ttft_s


# --- where it is found, and what that takes -----------------------------------------------------


def test_an_evicted_prompt_comes_from_host_memory_in_the_time_of_the_transfer() -> None:
    slow, fast = (
        run(EVICTED, *SMALL, f"simulation.host.memory_bandwidth={speed}")
        for speed in ("2GB", "4GB")
    )
    for result in (slow, fast):
        assert pool_of(result).host_tokens == 16 * 512
        assert result.outcomes[-1].cached_tokens == 16 * 512
    moved_s = 16 * BLOCK_BYTES / 2e9
    assert last_ttft_s(slow) - last_ttft_s(fast) == pytest.approx(moved_s / 2, rel=1e-6)
    without = run(EVICTED, *SMALL, "pool.enabled=off")
    assert without.outcomes[-1].cached_tokens == 0
    assert last_ttft_s(without) - last_ttft_s(slow) == pytest.approx(
        16 * 512 * PREFILL_TOKEN_S - moved_s, rel=0.01
    )


def test_what_memory_has_lost_comes_from_disk_in_its_time() -> None:
    tiers = ("pool.host_memory=1472MiB", "pool.disk=/nowhere", "pool.disk_size=64GiB")
    slow, fast = (
        run(EVICTED, *SMALL, *tiers, f"simulation.host.disk_latency={latency}")
        for latency in ("10ms", "5ms")
    )
    for result in (slow, fast):
        pool = pool_of(result)
        assert (pool.host_tokens, pool.disk_tokens) == (0, 16 * 512)
        assert pool.disk_blocks == 16 + 23
    assert last_ttft_s(slow) - last_ttft_s(fast) == pytest.approx(16 * 0.005, rel=1e-6)
    assert last_ttft_s(slow) > 16 * (0.010 + BLOCK_BYTES / 3e9)


def test_without_room_on_disk_it_is_computed_again() -> None:
    result = run(EVICTED, *SMALL, "pool.host_memory=1472MiB")
    assert pool_of(result).host_tokens == 0 and result.outcomes[-1].cached_tokens == 0


REMOTE = (
    *SMALL,
    "workers.0.replicas=2",
    "simulation.host.workers=1",
    "simulation.pools=[{}, {blocks: 18}]",
    "simulation.failures=[{worker: prefill-0, at: 35s}]",
)
THEN_AWAY = ((1, 16), (2, 16), (1, 16))
"""The decode worker forgets the first prompt, and the prefill worker that had it dies."""


def test_blocks_come_from_another_host_over_the_fabric() -> None:
    slow, fast = (
        run(asks(*THEN_AWAY), *REMOTE, f"simulation.fabric.bandwidth={speed}")
        for speed in ("5GB", "10GB")
    )
    for result in (slow, fast):
        pool = pool_of(result)
        assert (pool.nodes, pool.host_tokens, pool.remote_tokens) == (3, 0, 16 * 512)
    assert last_ttft_s(slow) - last_ttft_s(fast) == pytest.approx(16 * BLOCK_BYTES / 10e9, rel=1e-3)


def test_what_came_from_another_host_is_in_this_ones_memory_from_then_on() -> None:
    result = run(asks(*THEN_AWAY, (3, 16), (4, 16), (1, 16)), *REMOTE)
    pool = pool_of(result)
    assert (pool.remote_tokens, pool.host_tokens) == (16 * 512, 16 * 512)


def test_what_takes_longer_than_computing_is_declined_once_it_is_known() -> None:
    requests = asks(*[(1 + i % 2, 23) for i in range(8)])
    result = run(requests, *SMALL, "simulation.host.memory_bandwidth=500MB")
    pool = pool_of(result)
    assert pool.host_tokens == 23 * 512
    assert pool.declined_tokens == 5 * 23 * 512


def test_handoffs_through_the_pool_take_the_memorys_time() -> None:
    slow, fast = (
        run(
            asks((1, 16)),
            *SMALL,
            "transfer.handoff=pool",
            f"simulation.host.memory_bandwidth={speed}",
        )
        for speed in ("4GB", "8GB")
    )
    ends = [result.outcomes[0].last_token_s for result in (slow, fast)]
    assert ends[0] is not None and ends[1] is not None
    twice_s = 2 * 16 * BLOCK_BYTES / 4e9
    assert ends[0] - ends[1] == pytest.approx(twice_s / 2, rel=0.05)
    assert pool_of(fast).host_tokens == 16 * 512


# --- machines -----------------------------------------------------------------------------------

SPEEDS = HostSection(memory_bandwidth="1KB", disk_bandwidth="1KB", disk_latency="1s")  # type: ignore[arg-type]


def test_transfers_take_turns_in_a_hosts_memory() -> None:
    memory = HostMemory(1000)
    assert [memory.move(2000, 0.0), memory.move(1000, 0.5), memory.move(500, 9.0)] == [2, 3, 9.5]


def spills(count: int) -> tuple[Spill, ...]:
    return tuple(
        Spill(
            hash=BlockHash(bytes([i]) * 32),
            parent=None,
            place=PoolPlace(i),
            checksum=i + 1,
            slot=PoolPlace(i),
        )
        for i in range(count)
    )


def disk(host: SimHost) -> tuple[Clock, SimPoolDisk, list[tuple[float, object]]]:
    """A block takes 2 s."""
    clock = Clock()
    said: list[tuple[float, object]] = []
    pool_disk = SimPoolDisk(clock, host, 1000, lambda event: said.append((clock.now_s, event)))
    return clock, pool_disk, said


def test_a_disk_reads_before_it_writes_on() -> None:
    host = SimHost("pool-0", frozenset(), SPEEDS)
    host.memory.write([PoolPlace(i) for i in range(3)])
    clock, pool_disk, said = disk(host)
    pool_disk.put(WriteSlots(batch=1, spills=spills(3)))
    loads = (BlockLoad(hash=spills(1)[0].hash, slot=PoolPlace(0), place=PoolPlace(9)),)
    clock.at(3.0, pool_disk.put, ReadSlots(batch=2, parent=None, loads=loads))
    clock.run()
    assert said == [
        (6.0, SlotsRead(batch=2, checksums=(1,))),
        (8.0, SlotsWritten(batch=1, outcomes=(SlotOutcome.WRITTEN,) * 3)),
    ]
    assert host.memory.has(PoolPlace(9), 1)


def test_a_place_with_other_bytes_is_not_written_to_disk() -> None:
    host = SimHost("pool-0", frozenset(), SPEEDS)
    host.memory.write([PoolPlace(0), PoolPlace(1)])
    clock, pool_disk, said = disk(host)
    pool_disk.put(WriteSlots(batch=1, spills=spills(2)))
    host.memory.write([PoolPlace(0), PoolPlace(1)])
    clock.run()
    outcomes = (SlotOutcome.WRITTEN, SlotOutcome.DAMAGED)
    assert said == [(2.0, SlotsWritten(batch=1, outcomes=outcomes))]
    assert host.disk.slots.keys() == {0}, "the first was copied before"


def test_a_disk_that_dies_loses_the_block_that_it_writes() -> None:
    host = SimHost("pool-0", frozenset(), SPEEDS)
    host.memory.write([PoolPlace(0), PoolPlace(1)])
    clock, pool_disk, said = disk(host)
    pool_disk.put(WriteSlots(batch=1, spills=spills(2)))
    clock.at(3.0, lambda _: pool_disk.die())
    clock.run()
    assert host.disk.slots.keys() == {0} and said == []


def test_the_thread_of_a_node_fetches_first() -> None:
    clock, done = Clock(), []
    format_ = PoolFormat(fingerprint="f", physical_format="p", block_bytes=1)
    links = SimNodeLinks(clock, Fabric(FabricSection()), Incarnation("w"), format_, {}, done.extend)
    store = StoreBlocks(request_no=1, region="r", sources=(), places=())
    fetch = FetchBlocks(request_no=3, region="r", places=(), checksums=(), targets=())
    for job in (store, replace(store, request_no=2), fetch):
        links.executors[type(job)](job)
    clock.run()
    assert [one.request_no for one in done] == [1, 3, 2]  # type: ignore[attr-defined]
    assert all(one.error for one in done), "there is no node"  # type: ignore[attr-defined]


def test_nodes_are_read_beside_each_other() -> None:
    clock, done = Clock(), []
    format_ = PoolFormat(fingerprint="f", physical_format="p", block_bytes=1)
    links = SimNodeLinks(clock, Fabric(FabricSection()), Incarnation("w"), format_, {}, done.extend)
    first = FetchBlocks(request_no=1, region="r", places=(), checksums=(), targets=())
    for job in (first, replace(first, request_no=2), replace(first, request_no=3, node=FAR)):
        links.executors[FetchBlocks](job)
    clock.run()
    assert [one.request_no for one in done] == [1, 3, 2]  # type: ignore[attr-defined]


# --- deaths -------------------------------------------------------------------------------------

TIERS = ("pool.host_memory=1472MiB", "pool.disk=/nowhere", "pool.disk_size=64GiB")


def test_a_node_that_comes_back_has_its_disk_and_no_memory() -> None:
    dies = "simulation.failures=[{pool_node: pool-0, at: 30s, back_after: 5s}]"
    ample = ("pool.host_memory=64GiB", "pool.disk=/nowhere", "pool.disk_size=64GiB")
    pool = pool_of(run(EVICTED, *SMALL, *ample, dies))
    assert (pool.host_tokens, pool.disk_tokens) == (0, 16 * 512)
    without_disk = run(EVICTED, *SMALL, "pool.host_memory=64GiB", dies)
    assert without_disk.outcomes[-1].cached_tokens == 0
    assert pool_of(without_disk).stored_blocks == 16 + 23 + 16


def test_workers_go_on_without_a_node_that_stays_away() -> None:
    dies = "simulation.failures=[{pool_node: pool-0, at: 10s}]"
    result = run(EVICTED, *SMALL, dies)
    assert all(one.done for one in result.outcomes)
    assert pool_of(result).stored_blocks == 16 and pool_of(result).host_blocks == 0


def crowd(rng: Random, requests: int) -> list[TraceRequest]:
    """Prompts of several turns, which others continue."""
    at_s, made = 0.0, []
    for number in range(requests):
        name, blocks = rng.randrange(12), rng.randint(1, 10)
        shared = rng.randint(0, blocks)
        hashes = (*(name * 1000 + i for i in range(shared)), *_own(number, blocks - shared + 1))
        tokens, output = len(hashes) * 512 - rng.randrange(512), rng.randint(1, 60)
        made.append(
            TraceRequest(arrival_s=at_s, input_tokens=tokens, output_tokens=output, hash_ids=hashes)
        )
        at_s += rng.expovariate(4.0)
    return made


def _own(number: int, blocks: int) -> tuple[int, ...]:
    return tuple(10**6 + number * 100 + i for i in range(blocks))


def deaths(rng: Random, span_s: float, workers: list[str], nodes: int) -> str:
    found = []
    for _ in range(12):
        kind = rng.choice(["worker", "pool_node", "pool_node"])
        name = f"pool-{rng.randrange(nodes)}" if kind == "pool_node" else rng.choice(workers)
        back_s = rng.choice([0.001, 0.05, 0.3, 2.0])
        one = {kind: name, "at": f"{rng.uniform(0.1, span_s):.3f}s", "back_after": f"{back_s}s"}
        found.append(one)
    return f"simulation.failures={json.dumps(found)}"


WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
STORMY = (
    *POOL,
    "workers.0.replicas=2",
    "workers.1.replicas=2",
    "simulation.host.workers=2",
    "simulation.host.memory_bandwidth=3GB",
    "simulation.host.disk_bandwidth=2GB",
    "simulation.fabric.bandwidth=2GB",
    "simulation.fabric.latency=2ms",
    "simulation.blocks=100",
    *TIERS,
)


class Watched(ClusterSimulation):
    """Looks now and then at all that must hold."""

    every_s = 0.1

    def __init__(self, config: Config, requests: list[TraceRequest]) -> None:
        super().__init__(config, requests, Scale())
        self.clock.at(self.every_s, self._look)

    def _look(self, _: None) -> None:
        assert self.pools is not None
        for node in self.pools.living:
            node.core.validate()
            assert_blocks_are_whole(node)
        for worker in self.fleet.workers.values():
            if not worker.is_dead:
                worker.core.validate()
        if self.clients.is_waiting():
            self.clock.after(self.every_s, self._look)


def assert_blocks_are_whole(node: SimPoolNode) -> None:
    """In memory and on disk lie the bytes that the node believes to be there."""
    memory, disk = node.core.books.host, node.core.books.disk.blocks
    for block_hash in memory:
        at = memory.find(block_hash)
        assert at is not None and not memory.is_spoiled(at)
        place = memory.place(at)
        assert node.host.memory.has(place, node.core.checksums[place])
    for block_hash in disk:
        at = disk.find(block_hash)
        assert at is not None
        assert node.host.disk.slots[disk.place(at)].block.hash == block_hash


@pytest.mark.parametrize("handoff", ["push", "pull", "pool"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_dies_when_every_request_gets_its_tokens(seed: int, handoff: str) -> None:
    rng = Random(seed)
    requests = crowd(rng, 60)
    dying = deaths(rng, requests[-1].arrival_s, WORKERS, 2)
    settings = (*STORMY, f"transfer.handoff={handoff}", dying)
    watched = Watched(load_config(None, map(Override.parse, settings)), requests)
    simulated = watched.run()
    assert watched.pools is not None
    living = {name for name, one in simulated.fleet.workers.items() if not one.is_dead}
    assert all(node._links.keys() <= living for node in watched.pools.living)
    outcomes = simulated.outcomes
    unserved = [
        (number, one.failed)
        for number, one in enumerate(outcomes)
        if not (one.done and one.tokens == one.request.output_tokens)
    ]
    assert len(unserved) < 3
    for number, failed in unserved:
        assert failed == "worker_lost" and attempts(watched, number) == MAX_ATTEMPTS


def attempts(simulation: ClusterSimulation, number: int) -> int:
    (story,) = [
        story
        for router in simulation.routers
        for story in router.core.state.stories_of(str(number))
    ]
    again = [one for one in story.events if one.moment is Moment.TRIED_AGAIN]
    return 1 + sum(one.times for one in again)


def test_the_same_seed_is_the_same_report_whatever_dies() -> None:
    requests = crowd(Random(7), 80)
    dying = deaths(Random(8), requests[-1].arrival_s, WORKERS, 2)
    first, second = (run(requests, *STORMY, dying).report for _ in range(2))
    assert as_json([first]) == as_json([second])
    assert first.kv_pool is not None and first.kv_pool.host_tokens and first.kv_pool.remote_tokens


# --- the command --------------------------------------------------------------------------------


def test_reports_without_a_pool_say_nothing_of_it() -> None:
    report = run(EVICTED, *PLAIN).report
    assert report.kv_pool is None and "kv_pool" not in json.loads(as_json([report]))


def test_the_command_compares_with_and_without(tmp_path: Path) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "small.yaml"
    config.write_text(
        "name: small\npool: {host_memory: 4GiB}\nsimulation: {block_size: 512, blocks: 24}\n"
    )
    lines = (
        {
            "timestamp": one.arrival_s * 1000,
            "input_length": one.input_tokens,
            "output_length": one.output_tokens,
            "hash_ids": one.hash_ids,
        }
        for one in EVICTED
    )
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = ["simulate", str(config), "--trace", str(trace), "--compare"]
    answer = CliRunner().invoke(app, [*command, "pool.enabled=off,auto"])
    assert answer.exit_code == 0, answer.output
    rows = [line.split() for line in answer.output.splitlines()]
    (found,) = (row for row in rows if row[:3] == ["from", "host", "memory,"])
    tokens = sum(one.input_tokens for one in EVICTED)
    assert found[-3:] == ["-", f"{100 * 16 * 512 / tokens:.4g}", "-"]


def test_auto_is_on_if_the_size_is_given() -> None:
    """Whatever the machine that simulates has."""
    assert run(EVICTED, *PLAIN).report.kv_pool is None
    assert run(EVICTED, *PLAIN, "pool.disk=/nowhere").report.kv_pool is None
    assert pool_of(run(EVICTED, *PLAIN, "pool.host_memory=4GiB")).nodes == 1
    assert pool_of(run(EVICTED, *POOL)).nodes == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("pool.enabled=on", "pool.host_memory=auto"), "pool.host_memory: got auto, expected the"),
        (("pool.host_memory=1MiB",), "pool.host_memory: 1048576 bytes, but one block takes"),
        (
            ("pool.disk=/d", "pool.disk_size=1MiB"),
            "pool.disk_size: 1048576 bytes, but one block takes",
        ),
        (
            ("simulation.failures=[{pool_node: pool-3, at: 1s}]",),
            "simulation.failures.0.pool_node: got pool-3, expected one of pool-0",
        ),
        (
            ("simulation.failures=[{pool_node: pool-0, at: 1s}]", "pool.enabled=off"),
            "simulation.failures.0.pool_node: got pool-0, but the cluster has no pool",
        ),
        (("simulation.failures=[{at: 1s}]",), "either worker or pool_node"),
        (("simulation.host.workers=0",), "simulation.host.workers: got 0"),
    ],
)
def test_what_cannot_be_simulated_is_named(settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(EVICTED, *POOL, *settings)
