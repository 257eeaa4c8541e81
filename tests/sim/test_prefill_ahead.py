"""Random schedules of a prefill worker that launches chunks behind one another, on one device or in
a pipeline: the tokens and the handoff are those without, nothing is lost, nothing is stuck."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvpool.core.transfer.messages import HandoffMode
from kvrelay.types import RequestSpec
from tests.sim.fabric import Fabric
from tests.sim.model import ROW_BYTES, make_spec
from tests.sim.seeds import seeds
from tests.sim.test_schedules import (
    LAYOUTS,
    PIECEWISE,
    Driver,
    assert_clean,
    assert_right,
    emitted,
    ends_at_once,
    formula,
)

STAGES = pytest.mark.parametrize("stages", [1, 3], ids=["device", "pipeline"])


def ahead_fabric(seed: int, mode: HandoffMode, stages: int, *, ahead: bool = True) -> Fabric:
    """Layouts, blocks, slabs, and how long chunks are: as the seed has it."""
    rng = random.Random(seed)
    return Fabric(
        seed,
        prefill_blocks=rng.choice([14, 16, 40]),
        decode_blocks=rng.choice([16, 24, 60]),
        slabs=rng.choice([1, 2, 3]),
        slab_bytes=ROW_BYTES * rng.choice([5, 16, 64]),
        layout=[*LAYOUTS.values()][seed % 3],
        direct=True,
        mode=mode,
        prompt_steps=max(2, stages) if ahead else 1,
        stages=stages if ahead else 1,
        chunk_tokens=rng.choice([2, 3, 5, 8, 12]),
    )


def some_specs(seed: int, count: int = 20) -> list[RequestSpec]:
    """A few of them run alone."""
    rng = random.Random(seed)
    specs = [make_spec(rng, i) for i in range(count)]
    return [replace(spec, alone_tokens=1) if rng.random() < 0.1 else spec for spec in specs]


@STAGES
@pytest.mark.parametrize("mode", PIECEWISE)
@pytest.mark.parametrize("seed", seeds(9, long=60))
def test_the_tokens_and_the_handoff_are_those_without(
    seed: int, mode: HandoffMode, stages: int
) -> None:
    specs = [spec for spec in some_specs(seed) if not ends_at_once(spec)]
    told = []
    for ahead in (False, True):
        fabric = ahead_fabric(seed, mode, stages, ahead=ahead)
        driver = Driver(fabric, specs, split=True)
        fabric.run()
        for spec in specs:
            assert_right(fabric, spec)
        assert_clean(fabric)
        layout = fabric.p.shape.layout
        sent = sum(formula(layout, spec, driver.held[spec.key]) for spec in specs)
        assert fabric.moved_bytes == sent
        assert fabric.d.decode.reservations.canaries_mismatched == 0
        ids = {
            place: [one.token_ids for one in sorted(events, key=lambda e: e.first_index)]
            for place, events in emitted(fabric).items()
        }
        told.append(ids)
    assert told[0] == told[1]
    assert fabric.p.device.prompts_ahead > 0


@STAGES
def test_chunks_are_launched_ahead_and_marks_come_before_the_step_before_is_told(
    stages: int,
) -> None:
    found: Counter[str] = Counter()
    for seed in range(6):
        fabric = Fabric(
            seed,
            prefill_blocks=60,
            decode_blocks=80,
            slabs=8,
            prompt_steps=max(2, stages),
            stages=stages,
            chunk_tokens=5,
        )
        Driver(fabric, some_specs(seed, 8), split=True)
        fabric.run()
        assert_clean(fabric)
        device = fabric.p.device
        found.update(ahead=device.prompts_ahead, marks=device.early_marks)
        found.update(writes=device.early_writes)
    assert found["ahead"] > 10 and found["marks"] > 10 and found["writes"] > 0, found


@STAGES
@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(6, long=40))
def test_aborts_at_any_moment_leave_nothing(seed: int, mode: HandoffMode, stages: int) -> None:
    rng = random.Random(seed)
    specs = some_specs(seed)
    fabric = ahead_fabric(seed, mode, stages)
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


@STAGES
@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(6, long=40))
def test_broken_connections_at_any_moment_leave_nothing(
    seed: int, mode: HandoffMode, stages: int
) -> None:
    rng = random.Random(seed)
    fabric = ahead_fabric(seed, mode, stages)
    Driver(fabric, some_specs(seed, 16), split=True)
    for i in range(6):
        fabric.after(f"break {i}", fabric.lose_each_other, rng.uniform(0.05, 4))
    fabric.run()
    fabric.settle()
    assert_clean(fabric)


@STAGES
@pytest.mark.parametrize("seed", seeds(6, long=40))
def test_hardly_more_blocks_than_one_prompt_needs(seed: int, stages: int) -> None:
    fabric = Fabric(
        seed,
        prefill_blocks=random.Random(seed).choice([10, 11, 13]),
        decode_blocks=60,
        slabs=2,
        layout=[*LAYOUTS.values()][seed % 3],
        prompt_steps=max(2, stages),
        stages=stages,
        chunk_tokens=random.Random(seed).choice([2, 3, 5, 8]),
    )
    specs = some_specs(seed)
    Driver(fabric, specs, split=True)
    fabric.run()
    for spec in specs:
        assert_right(fabric, spec)
    assert_clean(fabric)
    assert fabric.p.device.prompts_ahead > 0
