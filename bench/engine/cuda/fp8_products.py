"""FP8 prefill's question: how much faster are a layer's products with activations in FP8?

The products of one Llama-3.1-8B layer, for a chunk of prompt tokens: bf16, and
`torch._scaled_mm` with a scale for each token and each output channel, its activations converted on
the way. Goal: less than 0.7 of bf16's time, else FP8 prefill is not worth a second set of weights.
"""

from __future__ import annotations

import argparse

import torch

from bench.engine.cuda.attention_times import time_device
from bench.report import Row, print_table

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096))
"""Inputs and outputs: query, key and value; output; gate and up; down."""
_LARGEST = 448.0  # of float8_e4m3fn


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in FP8, and the scale of each, float32 `[rows, 1]`."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _scaled(
    fp8: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, channels: torch.Tensor
) -> torch.Tensor:
    return torch._scaled_mm(
        fp8[0], weight.T, fp8[1], channels.T, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _product_s(device: str, tokens: int, inputs: int, outputs: int) -> tuple[float, float, float]:
    """Seconds in bf16; in FP8; in FP8 with the conversion of activations."""
    convert = torch.compile(to_fp8) if device.startswith("cuda") else to_fp8
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    weight_fp8, channels = to_fp8(weight)
    x_fp8 = to_fp8(x)
    return (
        time_device(lambda: x @ weight.T),
        time_device(lambda: _scaled(x_fp8, weight_fp8, channels)),
        time_device(lambda: _scaled(convert(x), weight_fp8, channels)),
    )


def times_s(device: str, tokens: int, smaller: int) -> dict[str, float]:
    """Of all products of a layer, whose sides are divided by `smaller`."""
    shapes = [(inputs // smaller, outputs // smaller) for inputs, outputs in SHAPES]
    each = zip(*(_product_s(device, tokens, *shape) for shape in shapes), strict=True)
    return dict(zip(("bf16", "fp8", "converted"), map(sum, each), strict=True))


def rows(device: str, tokens: int, smaller: int) -> list[Row]:
    found = times_s(device, tokens, smaller)
    return [
        Row(
            name=f"products of a layer, {tokens} tokens: {name}",
            value=1000 * found[name],
            unit="ms",
            against="bf16",
            against_value=1000 * found["bf16"],
            goal=0.7,
            lower_is_better=True,
            method="Llama-3.1-8B's shapes, device time, medians",
        )
        for name in ("fp8", "converted")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="sides of a 64th")
    args = parser.parse_args()
    smaller = 64 if args.rehearse else 1
    found = [row for tokens in args.tokens for row in rows(args.device, tokens, smaller)]
    print_table("FP8 products", found)


if __name__ == "__main__":
    main()
