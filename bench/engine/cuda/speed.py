"""The bare engine on one CUDA device against what the device can do.

A random model of Llama-3.1-8B's shape in bf16, made on the device; no checkpoint, no Ray. What the
device can do is measured in the same run: a large copy, read and written, and a matrix product.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import LlamaConfig

from bench.engine.cuda.ahead import ahead_row
from bench.engine.cuda.attention_times import Grid, measure, time_device, time_layer
from bench.engine.cuda.batch import Batch, batch_row
from bench.engine.cuda.random_engine import (
    LLAMA_8B,
    TINY,
    decode_batch,
    device_name,
    random_engine,
    whole_slice,
)
from bench.engine.cuda.shared import shared_rows
from bench.report import Reading, Row
from engine.attention.choosing.choice import group_shapes, opener
from engine.attention.choosing.needs import NEEDS, Wanted
from engine.core.step import StepBatch
from engine.model.kv_layout import probe
from engine.runner import Engine
from kvpool.memory.kv_memory import KvMemory

THUNDER_MLA = (4641, 45118, 1730, 1696)
_GRID: Grid = {
    "decode 1 x 4096": (1, 1, 4095),
    "decode 32 x 2048": (32, 1, 2047),
    "prefill 512 after 1536": (1, 512, 1536),
}
_SMALL_GRID: Grid = {"decode 2 x 32": (2, 1, 31), "prefill 16 after 16": (1, 16, 16)}
_REPEATS = 20
_BACKENDS = ("triton", "flashinfer", "flash", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What it can do, measured."""

    copy_bytes_per_s: float
    matmul_flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of what is measured; smaller in a rehearsal. `many` sequences of `short` tokens each take no
    more KV than `several` of `context`."""

    config: LlamaConfig = field(default_factory=lambda: LLAMA_8B)
    context: int = 2048
    several: int = 64
    short: int = 512
    many: int = 256
    long: int = 8192  # context of one layer's attention
    uneven: tuple[int, ...] = THUNDER_MLA
    grid: Grid = field(default_factory=lambda: _GRID)
    prompt: int = 8192
    batch: Batch = field(default_factory=Batch)
    copied_bytes: int = 2 << 30
    side: int = 8192

    @property
    def tokens(self) -> int:
        return self.several * self.context + self.many


SMALL = Sizes(
    config=TINY,
    context=32,
    several=4,
    short=16,
    many=8,
    long=64,
    uneven=(40, 90, 17, 16),
    grid=_SMALL_GRID,
    prompt=64,
    batch=Batch(requests=2, prompt_tokens=32, output_tokens=3, step_tokens=64),
    copied_bytes=1 << 20,
    side=64,
)


def measure_device(device: str, sizes: Sizes) -> Device:
    nbytes, side = sizes.copied_bytes, sizes.side
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    copied = time_device(lambda: target.copy_(source))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiplied = time_device(lambda: left @ right)
    return Device(copy_bytes_per_s=2 * nbytes / copied, matmul_flops=2 * side**3 / multiplied)


def _time_steps(engine: Engine, batch: StepBatch) -> Reading:
    """Whole steps, until the tokens are on the CPU."""
    values = []
    for i in range(_REPEATS + 3):
        begin = time.perf_counter()
        engine.run(batch)
        if i >= 3:
            values.append(time.perf_counter() - begin)
    return Reading(values=tuple(values))


def _read_bytes(engine: Engine, contexts: Sequence[int]) -> int:
    """The fewest that a decode step can read: the weights but the table of embeddings, and KV."""
    embeddings = engine.model.module.get_input_embeddings().weight
    return (
        engine.model.weight_bytes
        - embeddings.nbytes
        + sum(contexts) * engine.layout.bytes_per_token
    )


def decode_rows(engine: Engine, device: Device, sizes: Sizes, method: str) -> list[Row]:
    rows = []
    for count in (1, sizes.several):
        contexts = (sizes.context,) * count
        found = _time_steps(engine, decode_batch(engine.layout, contexts))
        rows.append(
            Row(
                name=f"decode step, {count} x {sizes.context:,} tokens",
                value=_read_bytes(engine, contexts) / found.median / 1e9,
                unit="GB/s",
                against="copy on the device, read and written",
                against_value=device.copy_bytes_per_s / 1e9,
                goal=0.8,
                method=method,
                spread=f"{1e3 * found.median:.2f} ms a step; {found.spread()} s",
            )
        )
    return rows


def python_row(engine: Engine, sizes: Sizes, method: str) -> Row:
    """A step's wall time less its time on the device: what the CPU adds."""
    batch = decode_batch(engine.layout, (sizes.short,) * sizes.many)
    whole = _time_steps(engine, batch)
    on_device = time_device(lambda: _logits(engine, batch))
    return Row(
        name=f"Python of a decode step, {sizes.many} x {sizes.short} tokens",
        value=1e3 * max(0.0, whole.median - on_device),
        unit="ms",
        against="goal",
        against_value=2.0,
        goal=1.0,
        lower_is_better=True,
        method=method,
        spread=f"step {1e3 * whole.median:.2f} ms, logits {1e3 * on_device:.2f} ms",
    )


def ahead_rows(engine: Engine, sizes: Sizes, method: str) -> list[Row]:
    shapes = [(1, sizes.context), (sizes.several, sizes.context), (sizes.many, sizes.short)]
    return [
        ahead_row(
            engine,
            decode_batch(engine.layout, (context,) * count),
            f"{count} x {context:,} tokens",
            method,
        )
        for count, context in shapes
    ]


def _logits(engine: Engine, batch: StepBatch) -> torch.Tensor:
    """Where steps are recorded: with nothing from Python in between."""
    graphs = engine.graphs
    return graphs.replay(len(batch.slices)) if graphs is not None else engine.logits(batch)


def prefill_row(engine: Engine, device: Device, sizes: Sizes, method: str) -> Row:
    tokens, side = sizes.prompt, sizes.side
    ids = torch.randint(2, sizes.config.vocab_size, (tokens,)).tolist()
    whole = whole_slice(0, tuple(ids), 0, range(engine.layout.blocks_for(tokens)))
    found = _time_steps(engine, StepBatch(slices=(whole,)))
    return Row(
        name=f"prefill of {tokens:,} tokens",
        value=prefill_flops(tokens, sizes.config) / found.median / 1e12,
        unit="TFLOP/s",
        against=f"matrix product of {side:,} x {side:,} x {side:,}",
        against_value=device.matmul_flops / 1e12,
        goal=0.7,
        method=method,
        spread=f"{1e3 * found.median:.1f} ms; {found.spread()} s",
    )


def prefill_flops(tokens: int, config: LlamaConfig = LLAMA_8B) -> float:
    """Of the layers; only the last token's logits are computed."""
    width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
    weights = width * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
    layers = config.num_hidden_layers * weights
    heads = config.num_hidden_layers * config.hidden_size
    return 2.0 * layers * tokens + 4.0 * heads * tokens**2 / 2


def attention_rows(
    engine: Engine, name: str, device: Device, sizes: Sizes, method: str
) -> list[Row]:
    """One layer's decode attention by itself."""
    wanted = wanted_by(engine)
    layout = replace(engine.layout, groups=(replace(engine.layout.groups[0], layers=(0,)),))
    wanted = replace(wanted, layout=layout)
    count, context = sizes.several, sizes.long
    seconds = _time_attention(wanted, name, (context,) * count)
    bandwidth = Row(
        name=f"decode attention of a layer, {count} x {context:,} tokens",
        value=count * context * layout.bytes_per_token / seconds / 1e9,
        unit="GB/s",
        against="copy on the device, read and written",
        against_value=device.copy_bytes_per_s / 1e9,
        goal=0.85,
        method=method,
        spread=f"{1e6 * seconds:.0f} us",
    )
    uneven = _time_attention(wanted, name, sizes.uneven)
    even = _time_attention(wanted, name, (sum(sizes.uneven) // 4,) * 4)
    balance = Row(
        name=f"decode attention of a layer, contexts {sizes.uneven}",
        value=1e6 * uneven,
        unit="us",
        against="four equal ones of the same total",
        against_value=1e6 * even,
        goal=1.2,
        lower_is_better=True,
        method=method,
    )
    return [bandwidth, balance]


def wanted_by(engine: Engine) -> Wanted:
    return Wanted(
        device=engine.model.device,
        dtype=engine.model.dtype,
        layout=engine.layout,
        groups=group_shapes(engine.layout, probe(engine.model)),
    )


def _time_attention(wanted: Wanted, name: str, contexts: Sequence[int]) -> float:
    """`wanted` has one layer."""
    layout = wanted.layout
    memory = KvMemory(layout, sum(map(layout.blocks_for, contexts)), wanted.device)
    for plane in memory.planes[0]:
        plane.normal_()
    backend = opener(name)(memory, wanted.groups, {0: (0, 0)})
    state = backend.prepare(decode_batch(layout, contexts).slices).state
    return time_layer(state, wanted.groups[0], wanted, len(contexts))


def backend_rows(engine: Engine, sizes: Sizes, method: str) -> list[Row]:
    """All that can serve the model here."""
    wanted = wanted_by(engine)
    names = [name for name in _BACKENDS if NEEDS[name](wanted) is None]
    found = {name: measure(opener(name), wanted, sizes.grid) for name in names}
    return [
        Row(
            name=f"attention of a layer by {name}, {work}",
            value=1e6 * seconds,
            unit="us",
            against="sdpa",
            against_value=1e6 * found["sdpa"][work],
            lower_is_better=True,
            method=method,
        )
        for work in sizes.grid
        for name, seconds in ((name, times[work]) for name, times in found.items())
    ]


def measure_engine(
    device: str, backend: str, sizes: Sizes, *, graphs: bool = True, fp8: bool = False
) -> list[Row]:
    """`fp8`: of an engine whose linear layers multiply in FP8, steps alone."""
    limits = measure_device(device, sizes)
    engine, chosen = random_engine(
        device,
        tokens=sizes.tokens,
        batch=sizes.many,
        backend=backend,
        graphs=graphs,
        fp8=fp8,
        config=sizes.config,
    )
    method = (
        f"random Llama, {sizes.config.num_hidden_layers} layers of {sizes.config.hidden_size}, "
        f"{'FP8 products' if fp8 else 'bf16'}, {device_name(device)}, "
        f"torch {torch.__version__}, attention {chosen}, "
        f"CUDA graphs {'on' if engine.graphs is not None else 'off'}"
    )
    steady = decode_batch(engine.layout, (sizes.context,) * sizes.several)
    steps: tuple[Callable[[], list[Row]], ...] = (
        lambda: decode_rows(engine, limits, sizes, method),
        lambda: ahead_rows(engine, sizes, method),
        lambda: [prefill_row(engine, limits, sizes, method)],
    )
    others: tuple[Callable[[], list[Row]], ...] = (
        lambda: [python_row(engine, sizes, method)],
        lambda: attention_rows(engine, chosen, limits, sizes, method),
        lambda: shared_rows(engine, steady, sizes.context, method),
        lambda: backend_rows(engine, sizes, method),
        lambda: [batch_row(engine, sizes.batch, method)],
    )
    parts = steps if fp8 else (*steps, *others)
    return [row for part in parts for row in _tried(part)]


def _tried(part: Callable[[], list[Row]]) -> list[Row]:
    """Printed as it comes, what fails left out: time on a device is dear."""
    try:
        rows = part()
    except Exception:
        traceback.print_exc()
        return []
    for row in rows:
        shown = "" if row.ratio is None else f", {row.ratio:.3g} of {row.against}"
        print(f"{row.name}: {row.value:.4g} {row.unit}{shown}; {row.spread}", flush=True)
    return rows
