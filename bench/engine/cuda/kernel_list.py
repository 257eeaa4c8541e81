"""Which kernels a step of an 8B model launches on a CUDA device, how often and for how long."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine.cuda.random_engine import LLAMA_8B, decode_batch, random_engine, whole_slice
from engine.core.step import StepBatch
from engine.runner import Engine

_WARM, _STEPS = 3, 5
_SHOWN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    args = parser.parse_args()
    engine, chosen = random_engine(
        args.device,
        tokens=64 * 2048 + 256,
        batch=64,
        backend=args.attention,
        graphs=True,
        fp8=args.quantization == "fp8",
    )
    print(torch.cuda.get_device_name(args.device), "torch", torch.__version__, "attention", chosen)
    steps = {
        "decode step of 1 x 2,048 tokens": decode_batch(engine.layout, (2048,)),
        "decode step of 64 x 2,048 tokens": decode_batch(engine.layout, (2048,) * 64),
        "prefill chunk of 512 tokens": _chunk(engine, 512),
        "prefill chunk of 2,048 tokens": _chunk(engine, 2048),
    }
    for name, batch in steps.items():
        print(f"\n{name}\n{_kernels(lambda b=batch: engine.run(b))}", flush=True)


def _chunk(engine: Engine, tokens: int) -> StepBatch:
    ids = torch.randint(2, LLAMA_8B.vocab_size, (tokens,)).tolist()
    blocks = range(engine.layout.blocks_for(tokens))
    return StepBatch(slices=(whole_slice(0, tuple(ids), 0, blocks),))


def _kernels(run: Callable[[], object]) -> str:
    """Of one run, the longest first."""
    for _ in range(_WARM):
        run()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_STEPS):
            run()
        torch.cuda.synchronize()
    each = sorted(found.key_averages(), key=lambda k: -k.self_device_time_total)
    each = [kernel for kernel in each if kernel.self_device_time_total > 0]
    total = sum(kernel.self_device_time_total for kernel in each) / _STEPS
    count = sum(kernel.count for kernel in each) / _STEPS
    lines = [f"{count:.0f} kernels, {total / 1e3:.2f} ms on the device"]
    for kernel in each[:_SHOWN]:
        lines.append(
            f"{kernel.self_device_time_total / _STEPS:9.0f} us {kernel.count / _STEPS:6.0f} x "
            f"{kernel.self_device_time_total / kernel.count:7.1f} us  {kernel.key[:110]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
