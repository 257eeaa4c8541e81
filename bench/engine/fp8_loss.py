"""What linear layers in FP8 lose, beside bf16, on a CPU: `quantization: fp8` as a worker has it.

First the bundled model's logits of every token, against fp32's. Then greedy tokens where prompts
are computed in FP8 and decoded in bf16, as a cluster with such a prefill pool does: each most
likely token, given the text that fp32 makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.kvpool.codec_loss import Handoff, Load, bench_engine, bundled_prompts
from bench.kvpool.kv_scales import distance
from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from engine.compiled.build import _OwnTokens
from engine.compiled.fp8 import in_fp8
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from engine.model.interface import attention_state
from engine.model.model import Model
from engine.runner import Engine
from kvpool.core.layout.codec import Codec

_TEXT = Path(__file__).parents[2] / "README.md"
_TOKENS = 1024


@torch.inference_mode()
def _logits(model: Model, token_ids: list[int]) -> torch.Tensor:
    rows = torch.arange(len(token_ids))
    with attention_state(_OwnTokens()):
        return model.whole(torch.tensor([token_ids]), rows[None], rows).float()


def whole_model() -> Iterator[str]:
    folder = checkpoint_path()
    checkpoint = open_checkpoint(str(folder))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT.read_text()).ids
    exact = _logits(load_model(checkpoint, device="cpu", dtype="float32"), ids[:_TOKENS])
    model = load_model(checkpoint, device="cpu", dtype="bfloat16")
    yield f"bf16: {distance(_logits(model, ids[:_TOKENS]), exact)}"
    yield f"fp8:  {distance(_logits(in_fp8(model), ids[:_TOKENS]), exact)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The most likely tokens: `first` `[prompts]` comes with the prompt, `decoded` `[steps,
    prompts]` after it."""

    first: torch.Tensor
    decoded: torch.Tensor

    def agreement(self, other: Chosen) -> dict[str, float]:
        """# which tokens |-> the share that is the same, %"""
        same = self.decoded == other.decoded
        parts = {
            "the prompt's token": self.first == other.first,
            "first decoded token": same[0],
            f"{len(same)} decoded tokens": same,
        }
        return {name: 100 * float(part.float().mean()) for name, part in parts.items()}


def chosen(run: Handoff, text: Chosen | None = None, *, received: bool = False) -> Chosen:
    """Given `text`; None: given its own tokens."""
    first = run.first
    if text is None:
        return Chosen(first=first, decoded=run.decode(received=received).tokens)
    run.first = text.first
    decoded = run.decode(received=received, forced=text.decoded).tokens
    run.first = first
    return Chosen(first=first, decoded=decoded)


def handed_over(prefill: Engine, decode: Engine, prompts: torch.Tensor, load: Load) -> Handoff:
    """Prompts of one engine, whose KV the other has."""
    run = Handoff(prefill, prompts, load, decode)
    run.send(Codec.NONE)
    return run


def fp8_engine(folder: Path, load: Load) -> Engine:
    engine = bench_engine(folder, load, compiled=False)
    engine.model = in_fp8(engine.model)
    return engine


def rows(name: str, folder: Path, prompts: torch.Tensor, load: Load) -> Iterator[Row]:
    exact, plain = (
        bench_engine(folder, load, dtype=dtype, compiled=False) for dtype in ("float32", "bfloat16")
    )
    text = chosen(Handoff(exact, prompts, load))
    in_bf16 = chosen(Handoff(plain, prompts, load), text)
    fp8 = fp8_engine(folder, load)
    both = chosen(handed_over(fp8, plain, prompts, load), text, received=True)
    in_fp8_alone = chosen(Handoff(fp8, prompts, load), text)
    found = {"bf16": in_bf16, "fp8, decoded in bf16": both, "fp8": in_fp8_alone}
    for way, tokens in found.items():
        yield from _agreements(f"{name}, {way}, as fp32", tokens, text, load)
        if way != "bf16":
            yield from _agreements(f"{name}, {way}, as bf16", tokens, in_bf16, load)


def _agreements(name: str, one: Chosen, other: Chosen, load: Load) -> Iterator[Row]:
    method = f"{load.prompts} prompts of {load.prompt_tokens} tokens, given fp32's greedy text"
    for which, percent in one.agreement(other).items():
        yield Row(name=f"{name}: {which}", value=percent, unit="%", method=method)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    args = parser.parse_args()
    for line in whole_model():
        print(line)
    load = Load(
        prompts=args.prompts, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens
    )
    table = [*rows("bundled", checkpoint_path(), bundled_prompts(load), load)]
    print_table("Prompts in FP8, decoded in bf16", table)
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
