"""Mooncake's break-even bandwidth: from where on fetching KV beats computing it again.

    python -m bench.papers.mooncake.goodput

Paper: Mooncake (Qin et al., FAST 2025), §4.2, equation 2: with p cached tokens of a model of l
layers and width d, reuse pays when B / G > 2 d s / (gqa (a p d + b d^2)), where B is bandwidth, G
what the devices compute, s the bytes of an element, and a = 4, b = 22 count a layer's operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.sim.profiles.load import known_device

_PAIR_OPERATIONS = 4
_TOKEN_OPERATIONS = 22
_DEVICES = 8
SOURCE = "FAST'25 §4.2, rounded there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama70b:
    """LLaMA3-70B as the paper counts it: the feed-forward network is in b."""

    layers: int = 80
    width: int = 8192
    query_heads_per_kv_head: int = 8
    element_bytes: int = 2


def break_even_bytes_per_s(model: Llama70b, flops_per_s: float, cached_tokens: int) -> float:
    """The bandwidth at which fetching the KV takes as long as computing it."""
    width = model.width
    per_token = _PAIR_OPERATIONS * cached_tokens * width + _TOKEN_OPERATIONS * width**2
    moved = 2 * width * model.element_bytes / model.query_heads_per_kv_head
    return flops_per_s * moved / per_token


def kv_kib_per_token(model: Llama70b) -> float:
    elements = 2 * model.layers * model.width / model.query_heads_per_kv_head
    return elements * model.element_bytes / 1024


def claims() -> Iterator[Claim]:
    model = Llama70b()
    for device, paper in (("a800-80gb-sxm", 6.0), ("h800-sxm", 19.0)):
        flops_per_s = _DEVICES * known_device(device).flops_per_s["float16"]
        ours = break_even_bytes_per_s(model, flops_per_s, cached_tokens=8192)
        what = f"break-even bandwidth, 8,192 tokens on {_DEVICES} x {device}"
        yield Claim(what=what, unit="GB/s", paper=paper, ours=ours / 1e9, source=SOURCE, digits=2)
    yield Claim(
        what="KV of a token",
        unit="KiB",
        paper=320.0,
        ours=kv_kib_per_token(model),
        source="FAST'25 §4.2",
        digits=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    found = list(claims())
    print_claims("Mooncake: when reuse pays", found)
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
