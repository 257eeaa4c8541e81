"""What a byte for each number of KV loses, with scales and without.

Every token's logits over keys and values that were rounded as they are kept, against those over
exact ones, in fp32. Scales are of each token and head, or of each layer and head, found on other
text; of fp8 powers of two, since its numbers float anyway, or exact.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import scaled_dot_product_attention

from engine.bundled import checkpoint_path
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from engine.model.interface import Scores, attention_state
from engine.model.model import Model

_TEXT = Path(__file__).parents[2] / "README.md"
_TOKENS = 1024
_FP8 = 448.0
Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Numbers `[1, heads, tokens, dim]`, the largest of each head in other text `[1, heads, 1, 1]`."""


def _fp8(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    kept = (x / scale).clamp(-_FP8, _FP8).to(torch.float8_e4m3fn)
    return kept.to(x.dtype) * scale


def _int8(x: torch.Tensor) -> torch.Tensor:
    scale = _largest(x) / 127
    return torch.round(x / scale) * scale


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True).clamp_min(1e-12)


def _power(largest: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(largest / _FP8)))


WAYS: dict[str, Round] = {
    "fp8, no scales (as served)": lambda x, _: _fp8(x),
    "fp8, powers of two by layer and head": lambda x, seen: _fp8(x, _power(4 * seen)),
    "fp8, powers of two by token and head": lambda x, _: _fp8(x, _power(_largest(x))),
    "fp8, exact by token and head": lambda x, _: _fp8(x, _largest(x) / _FP8),
    "int8, exact by token and head": lambda x, _: _int8(x),
}


@dataclass(slots=True)
class _Rounded:
    """Implements AttentionState: every token sees those before it. `seen` is of the first run."""

    way: Round | None = None
    seen: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        key, value = self._kept(key, (layer, "k")), self._kept(value, (layer, "v"))
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scores.scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()

    def _kept(self, x: torch.Tensor, name: tuple[int, str]) -> torch.Tensor:
        if self.way is None:
            self.seen.setdefault(name, x.abs().amax((2, 3), keepdim=True))
            return x
        return self.way(x, self.seen[name])


@torch.inference_mode()
def _logits(model: Model, token_ids: list[int], state: _Rounded) -> torch.Tensor:
    rows = torch.arange(len(token_ids))
    with attention_state(state):
        return model.whole(torch.tensor([token_ids]), rows[None], rows).float()


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    folder = checkpoint_path()
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT.read_text()).ids
    state = _Rounded()
    _logits(model, ids[_TOKENS : _TOKENS + 512], state)
    exact = _logits(model, ids[:_TOKENS], state)
    for name, way in WAYS.items():
        state.way = way
        print(f"{name}: {distance(_logits(model, ids[:_TOKENS], state), exact)}")


def distance(found: torch.Tensor, exact: torch.Tensor) -> str:
    """Of logits `[tokens, vocab]`, in words."""
    apart = found - exact
    logs = exact.log_softmax(-1)
    divergence = (logs.exp() * (logs - found.log_softmax(-1))).sum(-1).mean()
    same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    worst = apart.abs().max() / (exact.max() - exact.min())
    return (
        f"largest difference {worst:.3f} of the range, rms {apart.std() / exact.std():.4f} "
        f"standard deviations, divergence {divergence:.1e} nats, next token the same "
        f"{100 * same:.1f} %"
    )


if __name__ == "__main__":
    main()
