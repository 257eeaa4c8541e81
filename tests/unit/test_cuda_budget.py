"""A GPU's memory is divided before KV fills it: what is taken later has been counted.

Not run on a device: the driver and torch's allocator are stood in for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import memory_profile
from engine.core.sizing import (
    MOST_CONTEXT_BYTES,
    EngineLimits,
    KvSizing,
    MemoryProfile,
    size_kv,
    size_ranks,
)
from engine.memory_profile import profile_memory
from engine.model.model import Model
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.errors import ModelError
from tests.unit.fake_cuda_memory import STEP, FakeDevice, FakeEngine, Piece

MIB, GIB = 1 << 20, 1 << 30
PLANES = (Plane(name="k", heads=8, dim=128), Plane(name="v", heads=8, dim=128))


def layout(layers: int) -> KvLayout:
    group = LayerGroup(layers=tuple(range(layers)), planes=PLANES)
    return KvLayout(groups=(group,), dtype="bfloat16", block_size=16)


LAYOUT = layout(32)  # as Llama-3.1-8B's: 128 KiB a token
LIMITS = EngineLimits(
    max_model_len=None,
    prefill_chunk_tokens=2048,
    max_running_requests=10_000,
    staging_slabs=4,
    slabs_on_device=True,
)


@dataclass
class Gpu:
    """A worker on a GPU; `others`: bytes of other processes."""

    total: int = 80 * GIB
    context: int = 500 * MIB
    others: int = 0
    weights: int = 15 * GIB
    workspace: int = 32 * MIB
    step: int = GIB
    graphs: int = 400 * MIB
    layers: int = 32

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.total, self.context + self.others)
        self.engine = FakeEngine(
            self.device, workspace=self.workspace, step=self.step, graphs=self.graphs
        )
        self.held: list[object] = []

    @property
    def used(self) -> int:
        """By this worker."""
        return self.device.live + self.device.outside - self.others

    def load(self) -> None:
        self.held.append(self.device.take(self.weights))
        for _ in range(3):  # drafts check the model
            self.engine.step(self.engine.new_stream())

    def profile(self, limits: EngineLimits, *, records: bool = True) -> MemoryProfile:
        model = SimpleNamespace(device=torch.device("cuda:0"), weight_bytes=self.weights)
        return profile_memory(
            cast(Model, model),
            layout(self.layers),
            limits,
            131_072,
            lambda *_: self.engine.step(self.engine.new_stream()),
            copies_kv=False,
            record=(lambda _: self.engine.record()) if records else None,
        )

    def serve(self, sizing: KvSizing, profile: MemoryProfile) -> None:
        """Everything that a worker does after sizing, at its worst. `used` is then the most."""
        stream = self.engine.new_stream()
        self.held.append(self.device.take(sizing.kv_bytes))
        self.held.append(self.engine.record())
        self.held.append(self.device.take(profile.staging_bytes))
        self.engine.multiply(stream)
        self.held.append(self.device.take(self.step))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    def made(**sizes: int) -> Gpu:
        one = Gpu(**sizes)
        one.device.stand_in(monkeypatch)
        monkeypatch.setattr(memory_profile, "KvMemory", lambda *args: FakeKv(one.device, *args))
        one.load()
        return one

    return made


class FakeKv(Piece):
    def __init__(self, device: FakeDevice, layout: KvLayout, blocks: int, _: Any) -> None:
        nbytes = blocks * layout.bytes_per_block
        super().__init__(device, -(-nbytes // STEP) * STEP)
        self.flat = SimpleNamespace(numel=lambda: nbytes)


def sized(limits: EngineLimits, profile: MemoryProfile, kv: KvLayout = LAYOUT) -> KvSizing:
    return size_kv(kv, limits, profile, max_model_len=131_072)


@pytest.mark.parametrize("seed", range(40))
def test_a_worker_at_its_worst_stays_within_its_part(gpu: Callable[..., Gpu], seed: int) -> None:
    """Whatever the sizes are, and whether others use the device too."""
    chance = random.Random(seed)
    one = gpu(
        context=chance.randrange(100 * MIB, 900 * MIB),
        others=chance.choice([0, 0, chance.randrange(40 * GIB)]),
        weights=chance.randrange(GIB, 20 * GIB),
        workspace=chance.randrange(8 * MIB, 64 * MIB),
        step=chance.randrange(10 * MIB, 3 * GIB),
        graphs=chance.randrange(10 * MIB, 2 * GIB),
        layers=chance.randrange(5, 50),
    )
    fraction, share = chance.uniform(0.8, 1.0), chance.choice([1, 1, 2])
    limits = replace(LIMITS, memory_fraction=fraction, share=share)
    profile = one.profile(limits)
    assert one.device.live == -(-one.weights // STEP) * STEP, "what was measured in is gone"
    sizing = sized(limits, profile, layout(one.layers))
    one.serve(sizing, profile)
    part = limits.memory_fraction * one.total / limits.share
    assert one.used <= part
    spare = min(part - one.used, one.device.free)
    roundings = 2 * layout(one.layers).bytes_per_block + 2 * STEP
    assert spare <= roundings + (MOST_CONTEXT_BYTES if one.others else 0)


def test_alone_on_the_device_nothing_is_left_over(gpu: Callable[..., Gpu]) -> None:
    one = gpu()
    profile = one.profile(LIMITS)
    one.serve(sized(LIMITS, profile), profile)
    assert 0 <= 0.9 * one.total - one.used <= LAYOUT.bytes_per_block + 3 * STEP


def test_each_need_is_told(gpu: Callable[..., Gpu]) -> None:
    profile = gpu().profile(LIMITS)
    slab = 258 * MIB  # a chunk's 256 with its header
    assert {name: nbytes // MIB for name, nbytes in profile.needs.items()} == {
        "weights": 15 * 1024,
        "activations": 1024 + 32,
        "staging": 6 * slab // MIB,
        "context": 500 + 50,
        "workspaces": 2,
        "CUDA graphs": 400 + 32,
    }
    said = sized(LIMITS, profile).reason
    for part in (
        "0.9 x 80 GiB - weights 15 GiB - activations 1.031 GiB - staging 1.512 GiB",
        "- context 550 MiB - workspaces 2 MiB - CUDA graphs 432 MiB, at 128 KiB per token",
    ):
        assert part in said


def test_what_is_enough_says_beside_what(gpu: Callable[..., Gpu]) -> None:
    limits = replace(LIMITS, max_running_requests=1)
    said = sized(limits, gpu().profile(limits)).reason
    assert "all that 1 requests can need, of 0.9 x 80 GiB - weights 15 GiB - " in said


def test_graphs_that_are_not_recorded_take_nothing(gpu: Callable[..., Gpu]) -> None:
    assert gpu().profile(LIMITS, records=False).graph_bytes == 0


def test_slabs_on_the_host_take_two_copies(gpu: Callable[..., Gpu]) -> None:
    profile = gpu().profile(replace(LIMITS, slabs_on_device=False))
    assert profile.staging_bytes == 2 * 258 * MIB


def test_others_on_the_device_are_charged_to_nobody_but_take_their_room(
    gpu: Callable[..., Gpu],
) -> None:
    """Half of the device is used: a worker for 0.4 of it starts, one for 0.9 gets the rest."""
    small = replace(LIMITS, memory_fraction=0.4)
    one = gpu(others=40 * GIB)
    profile = one.profile(small)
    assert profile.context_bytes == MOST_CONTEXT_BYTES
    sizing = sized(small, profile)
    assert "only" not in sizing.reason
    one.serve(sizing, profile)
    one = gpu(others=40 * GIB)
    profile = one.profile(LIMITS)
    sizing = sized(LIMITS, profile)
    assert "(the device has only 21.5 GiB left for KV)" in sizing.reason
    one.serve(sizing, profile)


def test_each_rank_stays_within_its_part(gpu: Callable[..., Gpu]) -> None:
    """Of two GPUs, the second has more weights on it and another process."""
    sizes: list[dict[str, int]] = [{}, {"weights": 20 * GIB, "others": 10 * GIB}]
    devices, profiles = [], []
    for one in sizes:
        devices.append(gpu(**one))
        profiles.append(devices[-1].profile(LIMITS))
    parts = [LAYOUT.bytes_per_block] * 2
    found = size_ranks(LAYOUT, LIMITS, profiles, max_model_len=131_072, block_bytes=parts)
    assert "rank 1 of 2" in found.reason
    for device, profile in zip(devices, profiles, strict=True):
        device.serve(replace(found, kv_bytes=found.kv_bytes // 2), profile)
        assert device.used <= 0.9 * device.total


def test_too_little_left_is_told_with_its_numbers(gpu: Callable[..., Gpu]) -> None:
    one = gpu(total=18 * GIB, weights=14 * GIB)
    with pytest.raises(ModelError) as refused:
        sized(LIMITS, one.profile(LIMITS))
    for part in (
        "only 0 tokens of KV fit: 0.9 x 18 GiB - weights 14 GiB - activations 1.031 GiB",
        "- context 550 MiB - workspaces 2 MiB - CUDA graphs 432 MiB",
        "raise memory_fraction",
    ):
        assert part in str(refused.value)


def test_a_configured_size_that_does_not_fit_is_refused_before_it_is_taken(
    gpu: Callable[..., Gpu],
) -> None:
    limits = replace(LIMITS, kv_memory_bytes=70 * GIB)
    profile = gpu().profile(limits)
    with pytest.raises(ModelError, match=r"kv_memory takes 70 GiB and the device has 61\.\d+ GiB"):
        sized(limits, profile)
    assert sized(replace(limits, kv_memory_bytes=50 * GIB), profile).kv_bytes == 50 * GIB


def test_memory_that_ends_during_the_measurement_is_an_error(gpu: Callable[..., Gpu]) -> None:
    one = gpu(total=17 * GIB)
    one.engine._graphs = 2 * GIB
    with pytest.raises(torch.OutOfMemoryError):
        one.profile(LIMITS)
