"""Random schedules of a prefill and a decode worker: right tokens, nothing lost, nothing stuck."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.messages import HandoffMode
from kvpool.core.transfer.slabs import SlabState
from kvrelay.messages import (
    Generate,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    Tokens,
)
from kvrelay.types import Incarnation, RequestKey, RequestSpec
from tests.sim.fabric import Fabric
from tests.sim.model import GEMMA, MISTRAL, PLAIN, ROW_BYTES, expected, make_spec
from tests.sim.seeds import seeds

LAYOUTS = {"plain": PLAIN, "gemma": GEMMA, "mistral": MISTRAL}


class Driver:
    """A router without policy: asks until a request is taken, then sends it to prefill. A pace that
    the worker can't keep is given up."""

    def __init__(self, fabric: Fabric, specs: list[RequestSpec], *, split: bool) -> None:
        self.fabric = fabric
        self.split = split
        self.specs = {spec.key: spec for spec in specs}
        self.seen = 0
        self.held: dict[RequestKey, int] = {}
        fabric.stream.on_events = self.react
        for spec in specs:
            self.ask(spec)

    @property
    def source(self) -> Incarnation:
        return self.fabric.p.incarnation

    def ask(self, spec: RequestSpec, delay_s: float = 0.05) -> None:
        message = Reserve(spec=spec, source=self.source) if self.split else Generate(spec=spec)
        self.fabric.after(f"ask-{spec.key}", lambda: self.fabric.to_decode(message), delay_s)

    def react(self) -> None:
        events, self.seen = self.fabric.events[self.seen :], len(self.fabric.events)
        for event in events:
            if isinstance(event, ReserveRefused):
                if event.reason == "tpot_unreachable":
                    self.specs[event.key] = replace(self.specs[event.key], tpot_s=None)
                self.ask(self.specs[event.key], 0.5)
            if isinstance(event, Reserved) and self.split:
                self.held[event.key] = event.held_tokens
                self.fabric.prefill_request(self.specs[event.key], event.held_tokens)


def emitted(fabric: Fabric) -> dict[tuple[RequestKey, int], list[Tokens]]:
    by_choice = defaultdict(list)
    for event in fabric.events:
        if isinstance(event, Tokens):
            by_choice[event.key, event.choice].append(event)
    return by_choice


def assert_clean(fabric: Fabric) -> None:
    for tables in (fabric.p.tables, fabric.d.tables):
        tables.validate()
        assert tables.free_blocks == tables.blocks, list(tables.held())
    slabs = fabric.d.decode.reservations.slabs
    assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(fabric.now_s)


def assert_right(fabric: Fabric, spec: RequestSpec) -> None:
    by_choice = emitted(fabric)
    for choice in range(spec.sampling.n):
        events = sorted(by_choice[spec.key, choice], key=lambda e: e.first_index)
        tokens = [token for event in events for token in event.token_ids]
        assert [e.first_index for e in events] == list(range(len(events)))
        assert (tokens, events[-1].finish_reason) == expected(spec, choice)


@pytest.mark.parametrize("split", [True, False], ids=["split", "both"])
@pytest.mark.parametrize("seed", seeds(10, long=40))
def test_every_request_gets_its_right_tokens(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(20)]
    fabric = Fabric(seed, prefill_blocks=14, decode_blocks=rng.choice([14, 20, 60]), slabs=2)
    Driver(fabric, specs, split=split)
    fabric.run()
    for spec in specs:
        assert_right(fabric, spec)
    assert_clean(fabric)


PIECEWISE = (HandoffMode.PUSH, HandoffMode.PULL)


def any_fabric(seed: int, layout: KvLayout, mode: HandoffMode, **more: int) -> Fabric:
    """Block sizes, numbers of blocks and slabs, what a slab holds: as the seed has it."""
    rng = random.Random(seed)
    sizes = {
        "prefill_blocks": rng.choice([14, 20, 40]),
        "decode_block": rng.choice([2, 3, 4, 8]),
        "slabs": rng.choice([1, 2, 3]),
        "slab_bytes": ROW_BYTES * rng.choice([1, 5, 16, 64]),
    }
    tokens = rng.choice([56, 80, 240])
    blocks = -(-tokens // sizes["decode_block"])
    return Fabric(
        seed, layout=layout, mode=mode, direct=True, decode_blocks=blocks, **(sizes | more)
    )


@pytest.mark.parametrize("mode", PIECEWISE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", seeds(4, long=12))
def test_pieces_of_any_size_through_slabs_and_directly(
    seed: int, layout: str, mode: HandoffMode
) -> None:
    rng = random.Random(seed)
    specs = [spec for i in range(20) if not ends_at_once(spec := make_spec(rng, i))]
    fabric = any_fabric(seed, LAYOUTS[layout], mode)
    driver = Driver(fabric, specs, split=True)
    fabric.run()
    for spec in specs:
        assert_right(fabric, spec)
    assert_clean(fabric)
    assert fabric.d.mover.fetches > 0
    assert fabric.d.decode.reservations.canaries_passed > 0
    assert fabric.d.decode.reservations.canaries_mismatched == 0
    assert fabric.moved_bytes == sum(
        formula(LAYOUTS[layout], spec, driver.held[spec.key]) for spec in specs
    )


def formula(layout: KvLayout, spec: RequestSpec, held: int) -> int:
    """Bytes of what the token after the prompt, and those behind it, see and D lacks."""
    prompt = len(spec.prompt_ids)
    total = 0
    for group in layout.groups:
        first = 0 if group.window is None else prompt - group.window + 1
        total += len(group.layers) * ROW_BYTES * (prompt - max(first, held, 0))
    return total


def ends_at_once(spec: RequestSpec) -> bool:
    """Not all is sent for one that ends with its first tokens."""
    ends = [expected(spec, choice)[0] for choice in range(spec.sampling.n)]
    return all(len(tokens) == 1 for tokens in ends)


def test_layers_leave_while_later_ones_are_computed() -> None:
    early = 0
    for seed in range(10):
        rng = random.Random(seed)
        fabric = Fabric(seed, prefill_blocks=40, decode_blocks=60, slabs=8)
        Driver(fabric, [make_spec(rng, i) for i in range(8)], split=True)
        fabric.run()
        early += fabric.p.device.early_writes
    assert early > 10


def test_pull_takes_blocks_when_the_prompt_is_announced_and_there_is_room() -> None:
    """The decode worker accepts what doesn't fit together, and nothing is stuck."""
    rng = random.Random(1)
    specs = [make_spec(rng, i, longest=30) for i in range(20)]
    fabric = Fabric(1, prefill_blocks=60, decode_blocks=12, slabs=2, mode=HandoffMode.PULL)
    Driver(fabric, specs, split=True)
    together = 0
    while fabric.step():
        reservations = fabric.d.decode.reservations
        held = list(reservations._incoming.values())
        together = max(together, sum(len(r.message.spec.prompt_ids) + 1 for r in held))
        assert all(r.commit or r.announced for r in held if r.holder in fabric.d.tables)
        assert len(reservations.awaiting_blocks) <= len(held)
    assert together > 12 * fabric.d.shape.layout.block_size
    for spec in specs:
        assert_right(fabric, spec)
    assert_clean(fabric)


def test_preemption_happens_and_is_harmless() -> None:
    preemptions = 0
    for seed in range(10):
        rng = random.Random(seed)
        specs = [make_spec(rng, i, longest=20) for i in range(20)]
        fabric = Fabric(seed, prefill_blocks=14, decode_blocks=14, slabs=2)
        Driver(fabric, specs, split=True)
        fabric.run()
        for spec in specs:
            assert_right(fabric, spec)
        assert_clean(fabric)
        preemptions += fabric.d.decode.batch.running_set.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(8, long=40))
def test_aborts_at_any_moment_leave_nothing(seed: int, mode: HandoffMode) -> None:
    """A read may still be under way when the blocks it reads are another's."""
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(20)]
    fabric = any_fabric(seed, list(LAYOUTS.values())[seed % 3], mode)
    Driver(fabric, specs, split=True)
    aborted = {spec.key for spec in specs if rng.random() < 0.6}
    for spec in specs:
        if spec.key in aborted:
            fabric.after(f"abort-{spec.key}", lambda s=spec: fabric.abort(s), rng.uniform(0, 3))
    fabric.run()
    for spec in specs:
        if spec.key not in aborted:
            assert_right(fabric, spec)
    fabric.settle()
    assert_clean(fabric)


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(8, long=32))
def test_broken_connections_at_any_moment_leave_nothing(seed: int, mode: HandoffMode) -> None:
    """Each side learns of it late, and the reader goes on reading blocks that are another's by
    now: no wrong KV is ever used."""
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(16)]
    layout = list(LAYOUTS.values())[seed % 3]
    fabric = any_fabric(seed, layout, mode, prefill_blocks=14)
    Driver(fabric, specs, split=True)
    for i in range(6):
        fabric.after(f"break {i}", fabric.lose_each_other, rng.uniform(0.05, 4))
    fabric.run()
    fabric.settle()
    assert_clean(fabric)


@pytest.mark.parametrize("seed", seeds(8, long=32))
def test_stopped_choices_end_early_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(10)]
    fabric = Fabric(seed, prefill_blocks=20, decode_blocks=60, slabs=2)
    Driver(fabric, specs, split=True)
    for spec in specs:
        choice = rng.randrange(spec.sampling.n)
        stop = Stop(key=spec.key, choice=choice, valid_tokens=1)
        fabric.after(f"stop-{spec.key}", lambda s=stop: fabric.to_decode(s), 0.5)
    fabric.run()
    assert_clean(fabric)
    released = {event.key for event in fabric.events if isinstance(event, Released)}
    assert released == {spec.key for spec in specs}


def failed(fabric: Fabric) -> dict[RequestKey, str]:
    return {event.key: event.reason for event in fabric.events if isinstance(event, RequestFailed)}


@pytest.mark.parametrize("direct", [False, True], ids=["slabs", "reads"])
def test_a_copy_that_never_ends_is_told_and_all_comes_back(direct: bool) -> None:
    """Both loops live, and messages flow. The copies end with their connection."""
    rng = random.Random(1)
    specs = [make_spec(rng, i) for i in range(4)]
    fabric = Fabric(1, prefill_blocks=60, decode_blocks=80, slabs=4, direct=direct)
    fabric.p.mover.hangs = fabric.d.mover.hangs = lambda job: True
    Driver(fabric, specs, split=True)
    fabric.run(until_s=5)
    assert not failed(fabric)
    fabric.settle()
    assert {*failed(fabric)} == {spec.key for spec in specs if not ends_at_once(spec)}
    assert "transfer_timeout" in failed(fabric).values()
    assert {*failed(fabric).values()} <= {"transfer_timeout", "peer_lost", "transfer_failed"}
    assert_clean(fabric)
    assert not fabric.d.decode.reservations.leases
    assert len(fabric.p.core.copies) == len(fabric.d.core.copies) == 0


@pytest.mark.parametrize("mode", PIECEWISE)
@pytest.mark.parametrize("seed", seeds(8, long=40))
def test_copies_that_hang_now_and_then_cost_requests_and_no_block(
    seed: int, mode: HandoffMode
) -> None:
    """Whoever is not told of a failure gets the right tokens."""
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(20)]
    fabric = any_fabric(seed, list(LAYOUTS.values())[seed % 3], mode)
    fabric.p.mover.hangs = fabric.d.mover.hangs = lambda job: rng.random() < 0.03
    Driver(fabric, specs, split=True)
    fabric.run()
    fabric.settle()
    assert_clean(fabric)
    for spec in specs:
        if spec.key not in failed(fabric):
            assert_right(fabric, spec)


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("silent_after", range(1, 12))
def test_a_silent_prefill_worker_costs_its_requests_and_no_block(
    silent_after: int, mode: HandoffMode
) -> None:
    """It stops (SIGSTOP) in the middle: the leases end, its slabs are retired, D goes on."""
    rng = random.Random(silent_after)
    specs = [make_spec(rng, i) for i in range(6)]
    fabric = any_fabric(silent_after, GEMMA, mode)
    Driver(fabric, specs, split=True)
    fabric.run(until_s=0.05 * silent_after)
    fabric.silence_prefill()
    fabric.run()
    fabric.settle()
    tables = fabric.d.tables
    tables.validate()
    assert tables.free_blocks == tables.blocks, list(tables.held())
    slabs = fabric.d.decode.reservations.slabs
    assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(fabric.now_s)
