"""What linear layers in FP8 lose: the bundled model's logits of every token, against fp32's.

`quantization: fp8` as a worker has it, on a CPU, beside bf16, as the model is served without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.kvpool.kv_scales import distance
from engine.bundled import checkpoint_path
from engine.compiled.build import _OwnTokens
from engine.compiled.fp8 import in_fp8
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from engine.model.interface import attention_state
from engine.model.model import Model

_TEXT = Path(__file__).parents[2] / "README.md"
_TOKENS = 1024


@torch.inference_mode()
def _logits(model: Model, token_ids: list[int]) -> torch.Tensor:
    rows = torch.arange(len(token_ids))
    with attention_state(_OwnTokens()):
        return model.whole(torch.tensor([token_ids]), rows[None], rows).float()


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    folder = checkpoint_path()
    checkpoint = open_checkpoint(str(folder))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT.read_text()).ids
    exact = _logits(load_model(checkpoint, device="cpu", dtype="float32"), ids[:_TOKENS])
    model = load_model(checkpoint, device="cpu", dtype="bfloat16")
    print(f"bf16: {distance(_logits(model, ids[:_TOKENS]), exact)}")
    print(f"fp8:  {distance(_logits(in_fp8(model), ids[:_TOKENS]), exact)}")


if __name__ == "__main__":
    main()
