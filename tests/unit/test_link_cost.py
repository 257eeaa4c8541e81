import random
from dataclasses import replace

import pytest

from kvpool.core.transfer.link_cost import (
    LinkCost,
    Sample,
    TimedStep,
    TransferShape,
    TransferWay,
    fit,
)

NIXL = LinkCost(
    transport="nixl",
    latency_s=40e-6,
    bytes_per_s=5e9,
    descriptor_s=2.5e-6,
    direct_bytes_per_s=4e9,
    gather_bytes_per_s=9e9,
    scatter_bytes_per_s=8e9,
    run_s=3e-6,
    read_s=60e-6,
    write_s=50e-6,
)
SHM = LinkCost(
    transport="shm",
    latency_s=20e-6,
    bytes_per_s=10e9,
    descriptor_s=1e-6,
    direct_bytes_per_s=9e9,
    gather_bytes_per_s=9e9,
    scatter_bytes_per_s=9e9,
    run_s=3e-6,
    mapped=True,
)
BLOCK_BYTES = 65536  # 16 tokens of a layer and a plane are 32 KiB in Llama-3.1-8B
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 469)
PIECES = (1, 2, 8, 64)
POOL_BY_PROBE = 1.05  # a byte of a pool, by one of the region that is probed
PREPARED = 0.5  # of a descriptor's cost, that is listing it


def samples_of(truth: LinkCost, noise: float, rng: random.Random) -> list[Sample]:
    def noisy(seconds: float) -> float:
        return seconds * rng.uniform(1 - noise, 1 + noise)

    found = [Sample(step=TimedStep.MESSAGE, seconds=noisy(2 * truth.latency_s)) for _ in range(9)]
    for size in (4096, 65536, 2**20, 2**22):
        found += [write_of(truth, size, noisy) for _ in range(3)]
        for pieces in (1, 16, 128):
            prepare_s = 0.0 if truth.mapped else PREPARED * truth.descriptor_s
            listed_s = noisy(pieces * prepare_s)
            found.append(Sample(step=TimedStep.PREPARE, pieces=pieces, seconds=listed_s))
            posted_s = pieces * (truth.descriptor_s - prepare_s)
            read_s = truth.read_s + posted_s + size / (POOL_BY_PROBE * truth.direct_bytes_per_s)
            found.append(
                Sample(step=TimedStep.READ, nbytes=size, pieces=pieces, seconds=noisy(read_s))
            )
            for step, speed in (
                (TimedStep.GATHER, truth.gather_bytes_per_s),
                (TimedStep.SCATTER, truth.scatter_bytes_per_s),
            ):
                copy_s = noisy(pieces * truth.run_s + size / speed)
                found.append(Sample(step=step, nbytes=size, pieces=pieces, seconds=copy_s))
    return found


def write_of(truth, size, noisy):
    seconds = noisy(truth.write_s + size / truth.bytes_per_s)
    return Sample(step=TimedStep.WRITE, nbytes=size, seconds=seconds)


def shapes() -> list[TransferShape]:
    """Sizes times how scattered the blocks are times how finely planes and layers cut them."""
    return [
        TransferShape(
            nbytes=blocks * BLOCK_BYTES,
            descriptors=-(-blocks // merged) * cuts,
            source_runs=-(-blocks // merged),
            target_runs=-(-blocks // merged),
        )
        for blocks in BLOCKS
        for merged in (1, 4, 16)
        for cuts in PIECES
    ]


@pytest.mark.parametrize("truth", [NIXL, SHM], ids=lambda cost: cost.transport)
def test_coefficients_are_recovered(truth):
    found = fit(truth.transport, samples_of(truth, 0.0, random.Random(1)), mapped=truth.mapped)
    for name in ("latency_s", "bytes_per_s", "descriptor_s", "direct_bytes_per_s", "run_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3), name
    assert found.gather_bytes_per_s == pytest.approx(truth.gather_bytes_per_s, rel=1e-3)
    assert found.scatter_bytes_per_s == pytest.approx(truth.scatter_bytes_per_s, rel=1e-3)
    assert found.read_s == pytest.approx(truth.read_s, abs=1e-9)
    assert found.write_s == pytest.approx(truth.write_s, abs=1e-9)
    assert found.mapped == truth.mapped


@pytest.mark.parametrize("truth", [NIXL, SHM], ids=lambda cost: cost.transport)
def test_noise_of_a_tenth_moves_coefficients_little(truth):
    found = fit(truth.transport, samples_of(truth, 0.1, random.Random(2)), mapped=truth.mapped)
    for name in ("latency_s", "bytes_per_s", "descriptor_s", "run_s", "gather_bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.25), name


@pytest.mark.parametrize("truth", [NIXL, SHM], ids=lambda cost: cost.transport)
@pytest.mark.parametrize("seed", range(5))
def test_the_faster_way_is_chosen_on_a_grid_of_sizes(truth, seed):
    found = fit(truth.transport, samples_of(truth, 0.1, random.Random(seed)), mapped=truth.mapped)
    grid = shapes()
    right = sum(
        truth.seconds(found.choose(shape), shape)
        == min(truth.seconds(way, shape) for way in TransferWay)
        for shape in grid
    )
    assert right >= 0.95 * len(grid), f"{right} of {len(grid)}"


def test_the_grid_holds_both_answers():
    chosen = [NIXL.choose(shape) for shape in shapes()]
    assert 0.1 * len(chosen) < chosen.count(TransferWay.DIRECT) < 0.9 * len(chosen)


def test_pieces_overlap_gathering_with_scattering():
    shape = TransferShape(nbytes=2**26, descriptors=8, source_runs=8, target_runs=8)
    pieces = TransferShape(nbytes=2**23, descriptors=1, source_runs=1, target_runs=1).times(8)
    assert pieces == replace(shape, pieces=8)
    assert NIXL.seconds(TransferWay.COLLATED, pieces) < 0.8 * NIXL.seconds(
        TransferWay.COLLATED, shape
    )
    posted_s = NIXL.seconds(TransferWay.DIRECT, pieces) - NIXL.seconds(TransferWay.DIRECT, shape)
    assert posted_s == pytest.approx(7 * NIXL.read_s)


def test_a_formula_by_hand():
    shape = TransferShape(nbytes=8_000_000, descriptors=100, source_runs=10, target_runs=20)
    direct = 5 * 40e-6 + 60e-6 + 100 * 2.5e-6 + 8e6 / 4e9
    collated = 3 * 40e-6 + 10 * 3e-6 + 8e6 / 9e9 + 50e-6 + 8e6 / 5e9 + 20 * 3e-6 + 8e6 / 8e9
    assert NIXL.seconds(TransferWay.DIRECT, shape) == pytest.approx(direct)
    assert NIXL.seconds(TransferWay.COLLATED, shape) == pytest.approx(collated)


def test_what_is_gathered_into_mapped_memory_takes_twice_as_long():
    shape = TransferShape(nbytes=1_000_000, descriptors=100, source_runs=10, target_runs=20)
    each = 30 * 3e-6 + 3e6 / 9e9
    assert SHM.seconds(TransferWay.COLLATED, shape.times(4)) == pytest.approx(9 * 20e-6 + 4 * each)


def test_two_devices_copy_at_once_as_fast_as_the_link_between_them():
    """A gather reads its own memory while it writes to the other's."""
    shape = TransferShape(nbytes=1_000_000, descriptors=100, source_runs=10, target_runs=20)
    apart = replace(SHM, transport="cuda_ipc", apart=True, bytes_per_s=4e9)
    sent, scattered = 10 * 3e-6 + 1e6 / 4e9, 20 * 3e-6 + 1e6 / 9e9
    assert sent > scattered
    expected = 9 * 20e-6 + 4 * sent + scattered
    assert apart.seconds(TransferWay.COLLATED, shape.times(4)) == pytest.approx(expected)
    fast = replace(apart, bytes_per_s=400e9)
    bound_by_reads = 3 * 20e-6 + 10 * 3e-6 + 1e6 / 9e9 + scattered
    assert fast.seconds(TransferWay.COLLATED, shape) == pytest.approx(bound_by_reads)
    found = fit("cuda_ipc", samples_of(apart, 0.0, random.Random(1)), mapped=True, apart=True)
    assert found.apart and found.bytes_per_s == pytest.approx(4e9, rel=1e-3)


def test_what_is_too_small_to_be_seen_is_zero_not_negative():
    samples = samples_of(SHM, 0.3, random.Random(7))
    found = fit("shm", samples, mapped=True)
    assert found.write_s >= 0 and found.read_s >= 0 and found.descriptor_s >= 0
    assert found.bytes_per_s > 0


def test_a_step_without_samples_is_named():
    only_messages = [Sample(step=TimedStep.MESSAGE, seconds=1e-5)]
    with pytest.raises(ValueError, match="no sample of write, prepare, read, gather, scatter"):
        fit("shm", only_messages)


def test_a_disturbed_measurement_is_corrected_by_the_next() -> None:
    names = ("latency_s", "descriptor_s", "run_s", "read_s", "write_s")
    speeds = ("bytes_per_s", "direct_bytes_per_s", "gather_bytes_per_s", "scatter_bytes_per_s")
    slow = replace(
        NIXL,
        **{name: 10 * getattr(NIXL, name) for name in names},
        **{name: getattr(NIXL, name) / 10 for name in speeds},
    )
    assert slow.renewed(NIXL) == NIXL
    once = NIXL.renewed(slow)
    assert once.latency_s == pytest.approx(5.5 * NIXL.latency_s)
    assert once.bytes_per_s == pytest.approx(NIXL.bytes_per_s / 5.5)
    for _ in range(10):
        once = once.renewed(slow)
    assert once.latency_s == pytest.approx(slow.latency_s, rel=0.01)
    assert once.gather_bytes_per_s == pytest.approx(slow.gather_bytes_per_s, rel=0.01)
