"""Which kernels a step of an 8B model launches on a CUDA device, how often and for how long."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from operator import attrgetter

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine.cuda.random_engine import (
    LLAMA_8B,
    TINY,
    decode_batch,
    device_name,
    random_engine,
    whole_slice,
)
from engine.core.step import StepBatch
from engine.runner import Engine

_WARM, _STEPS = 3, 5
_SHOWN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model and short contexts")
    args = parser.parse_args()
    context, chunks = (32, (16, 24)) if args.rehearse else (2048, (512, 2048))
    engine, chosen = random_engine(
        args.device,
        tokens=64 * context + 256,
        batch=64,
        backend=args.attention,
        graphs=True,
        fp8=args.quantization == "fp8",
        config=TINY if args.rehearse else LLAMA_8B,
    )
    print(device_name(args.device), "torch", torch.__version__, "attention", chosen)
    steps = {
        f"decode step of {count} x {context:,} tokens": decode_batch(
            engine.layout, (context,) * count
        )
        for count in (1, 64)
    }
    steps |= {f"prefill chunk of {tokens:,} tokens": _chunk(engine, tokens) for tokens in chunks}
    for name, batch in steps.items():
        print(f"\n{name}\n{_kernels(lambda b=batch: engine.run(b))}", flush=True)


def _chunk(engine: Engine, tokens: int) -> StepBatch:
    ids = torch.randint(2, engine.facts.vocab_size, (tokens,)).tolist()
    blocks = range(engine.layout.blocks_for(tokens))
    return StepBatch(slices=(whole_slice(0, tuple(ids), 0, blocks),))


def _kernels(run: Callable[[], object]) -> str:
    """Of one run, the longest first; in a rehearsal the CPU's operations."""
    on_cuda = torch.cuda.is_available()
    time_of = attrgetter("self_device_time_total" if on_cuda else "self_cpu_time_total")
    for _ in range(_WARM):
        run()
    kind = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as found:
        for _ in range(_STEPS):
            run()
        if on_cuda:
            torch.cuda.synchronize()
    each = sorted(found.key_averages(), key=time_of, reverse=True)
    each = [kernel for kernel in each if time_of(kernel) > 0]
    total = sum(map(time_of, each)) / _STEPS
    count = sum(kernel.count for kernel in each) / _STEPS
    lines = [f"{count:.0f} kernels, {total / 1e3:.2f} ms on the device"]
    for kernel in each[:_SHOWN]:
        lines.append(
            f"{time_of(kernel) / _STEPS:9.0f} us {kernel.count / _STEPS:6.0f} x "
            f"{time_of(kernel) / kernel.count:7.1f} us  {kernel.key[:110]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
