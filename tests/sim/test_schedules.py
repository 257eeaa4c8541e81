"""Random schedules of a prefill and a decode worker: right tokens, nothing lost, nothing stuck."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from kvpool.slabs import SlabState
from kvrelay.messages import (
    Generate,
    Released,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    Tokens,
)
from kvrelay.types import Incarnation, RequestKey, RequestSpec
from tests.sim.fabric import Fabric
from tests.sim.model import expected, make_spec


class Driver:
    """A router without policy: asks until a request is taken, then sends it to prefill."""

    def __init__(self, fabric: Fabric, specs: list[RequestSpec], *, split: bool) -> None:
        self.fabric = fabric
        self.split = split
        self.specs = {spec.key: spec for spec in specs}
        self.seen = 0
        for spec in specs:
            self.ask(spec)

    def ask(self, spec: RequestSpec, delay_s: float = 0.05) -> None:
        message = Reserve(spec=spec, source=Incarnation("p")) if self.split else Generate(spec=spec)
        self.fabric.after(
            f"ask-{spec.key}", lambda: (self.fabric.to_decode(message), self.react()), delay_s
        )

    def react(self) -> None:
        events, self.seen = self.fabric.events[self.seen :], len(self.fabric.events)
        for event in events:
            if isinstance(event, ReserveRefused):
                self.ask(self.specs[event.key], 0.5)
            if isinstance(event, Reserved) and self.split:
                self.fabric.prefill_request(self.specs[event.key])


def emitted(fabric: Fabric) -> dict[tuple[RequestKey, int], list[Tokens]]:
    by_choice = defaultdict(list)
    for event in fabric.events:
        if isinstance(event, Tokens):
            by_choice[event.key, event.choice].append(event)
    return by_choice


def assert_clean(fabric: Fabric) -> None:
    for tables in fabric.tables.values():
        tables.validate()
        assert tables.free_blocks == tables.blocks, list(tables.held())
    slabs = fabric.decode.receiver.slabs
    assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(fabric.now_s)


def assert_right(fabric: Fabric, spec: RequestSpec) -> None:
    by_choice = emitted(fabric)
    for choice in range(spec.sampling.n):
        events = sorted(by_choice[spec.key, choice], key=lambda e: e.first_index)
        tokens = [token for event in events for token in event.token_ids]
        assert [e.first_index for e in events] == list(range(len(events)))
        assert (tokens, events[-1].finish_reason) == expected(spec, choice)


@pytest.mark.parametrize("split", [True, False], ids=["split", "both"])
@pytest.mark.parametrize("seed", range(25))
def test_every_request_gets_its_right_tokens(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(20)]
    fabric = Fabric(seed, prefill_blocks=14, decode_blocks=rng.choice([14, 20, 60]), slabs=2)
    Driver(fabric, specs, split=split)
    fabric.run()
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
        preemptions += fabric.decode.batch.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("seed", range(40))
def test_aborts_at_any_moment_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(20)]
    fabric = Fabric(seed, prefill_blocks=14, decode_blocks=20, slabs=2)
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


@pytest.mark.parametrize("seed", range(20))
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


@pytest.mark.parametrize("silent_after", range(1, 12))
def test_a_silent_prefill_worker_costs_its_requests_and_no_block(silent_after: int) -> None:
    """It stops (SIGSTOP) in the middle: the leases end, its slabs are retired, D goes on."""
    rng = random.Random(silent_after)
    specs = [make_spec(rng, i) for i in range(6)]
    fabric = Fabric(silent_after, prefill_blocks=40, decode_blocks=60, slabs=2)
    Driver(fabric, specs, split=True)
    fabric.run(until_s=0.05 * silent_after)
    fabric.silence_prefill()
    fabric.run()
    fabric.settle()
    tables = fabric.tables["d"]
    tables.validate()
    assert tables.free_blocks == tables.blocks, list(tables.held())
    slabs = fabric.decode.receiver.slabs
    assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(fabric.now_s)
