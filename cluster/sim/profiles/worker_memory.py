"""The memory of a worker's GPUs, and the KV for which `kvrelay serve` finds room on them. Pure.

serve's own arithmetic sizes the KV, with staging as it computes it. What a worker measures when it
starts is allowed for here, by bounds that were not measured on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.config.schema import EngineSection, SchedulerSection, Transfer
from engine.core.model_shape import ModelShape
from engine.core.sizing import (
    MOST_CONTEXT_BYTES,
    EngineLimits,
    KvSizing,
    MemoryProfile,
    size_kv,
    size_ranks,
    staging_bytes,
)
from engine.core.step import MOST_SCORED_TOKENS
from engine.parallel.grid import Grid
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane

WORKSPACE_BYTES = 128 << 20
"""cuBLAS's workspaces of two streams (32 MiB each on Hopper, see `engine.device.cuda_memory`), and
as much again for tables and rounding."""
GRAPH_BYTES = 512 << 20
"""Of recorded decode steps. Not measured."""
_HIDDEN_COPIES = 8
"""Residual, inputs and outputs of a layer's parts, and those that norms widen to fp32."""
_ROUTED_COPIES = 4
"""For each expert of a token: what goes in and what comes out, and copies of both."""
_LOGIT_BYTES = 4
"""Of a logit in fp32, beside the model's own."""
_DRAW_BYTES = 3 * 4
"""Of a logit from which is drawn: scaled, with its noise, and a copy between."""
_UNBOUNDED_TOKENS = 1 << 40
"""Only memory limits a sequence here."""


def planned_limits(memory_fraction: float) -> EngineLimits:
    """What a cluster file says by default of workers with a GPU each, whose peers are on the same
    machine: slabs lie on the device, where cuda_ipc reaches them."""
    scheduler = SchedulerSection()
    return EngineLimits(
        max_model_len=None,
        prefill_chunk_tokens=scheduler.chunk_tokens(on_gpu=True),
        max_running_requests=scheduler.max_running_requests,
        memory_fraction=memory_fraction,
        staging_slabs=Transfer().staging_slabs,
        slabs_on_device=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """A rank on each GPU. `weight_bytes`: # stage |-> of each of its ranks. `computed_bytes`: of an
    element of activations."""

    shape: ModelShape
    grid: Grid
    weight_bytes: tuple[float, ...]
    kv_element_bytes: float
    computed_bytes: float
    memory_bytes: int
    limits: EngineLimits

    def sizing(self) -> KvSizing:
        """The KV that fits on all ranks. Raises ModelError, which says why none does."""
        profiles = [self._profile(rank) for rank in range(self.grid.size)]
        parts, longest = list(self._block_bytes()), _UNBOUNDED_TOKENS
        if self.grid.size > 1:
            return size_ranks(
                self.layout, self.limits, profiles, max_model_len=longest, block_bytes=parts
            )
        return size_kv(self.layout, self.limits, profiles[0], max_model_len=longest)

    @property
    def layout(self) -> KvLayout:
        """Of the model's size, as one plane of bytes."""
        nbytes = max(1, round(self.shape.kv_bytes_per_token(self.kv_element_bytes)))
        group = LayerGroup(layers=(0,), planes=(Plane(name="kv", heads=1, dim=nbytes),))
        block_size = EngineSection().block_size
        return KvLayout(groups=(group,), dtype="float8_e4m3fn", block_size=block_size)

    def _profile(self, rank: int) -> MemoryProfile:
        """Slabs are rank 0's alone."""
        return MemoryProfile(
            total_bytes=self.memory_bytes,
            weight_bytes=round(self.weight_bytes[self.grid.stage(rank)]),
            activation_bytes=self.activation_bytes(),
            staging_bytes=0 if rank else staging_bytes(self.layout, self.limits, on_cpu=False),
            context_bytes=MOST_CONTEXT_BYTES,
            kept_bytes=WORKSPACE_BYTES,
            graph_bytes=GRAPH_BYTES,
        )

    def activation_bytes(self) -> int:
        """Of a step with the largest chunk and batch: what the matrices of one layer give, all at
        once, copies of the hidden state and of the KV, and logits."""
        limits, shape = self.limits, self.shape
        tokens = limits.prefill_chunk_tokens + limits.max_running_requests
        scored = min(MOST_SCORED_TOKENS, limits.prefill_chunk_tokens) + limits.max_running_requests
        vocabulary = shape.head_parameters // shape.hidden
        logits = (
            scored * (self.computed_bytes + _LOGIT_BYTES)
            + limits.max_running_requests * _DRAW_BYTES
        )
        return int(tokens * self._layer_elements() * self.computed_bytes + vocabulary * logits)

    def _layer_elements(self) -> float:
        """Of a token. Nearly every matrix has the hidden width at one end, and gives or takes the
        width at its other."""
        shape = self.shape
        widths = shape.active_parameters / (shape.layers * shape.hidden)
        kept = 2 * max(kind.kv_elements for kind in shape.attentions)
        hidden = (_HIDDEN_COPIES + _ROUTED_COPIES * shape.experts_per_token) * shape.hidden
        return (widths + kept) / self.grid.tensor + hidden

    def _block_bytes(self) -> Iterator[int]:
        """Of each rank. Beyond a kind's KV heads, ranks keep them twice."""
        tensor, layers = self.grid.tensor, self.shape.layers
        token_bytes = self.kv_element_bytes * sum(
            kind.layers * kind.kv_elements / min(tensor, kind.kv_heads)
            for kind in self.shape.attentions
        )
        for rank in range(self.grid.size):
            share = len(self.grid.layers(self.grid.stage(rank), layers)) / layers
            yield max(1, round(token_bytes * share * self.layout.block_size))
