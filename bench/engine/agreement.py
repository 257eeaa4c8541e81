"""How near bf16 is to transformers: the logits given the same text, and 200 greedy tokens.

There are three measures. What an order of summation makes: transformers beside itself with the
model's hidden and inner dimensions permuted, which changes no sum but the order it is added in.
What another order of attention makes, and of its rounding: transformers' eager attention beside its
sdpa. And how far transformers itself is from the same weights in fp32.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.kvpool.codec_loss import Handoff, Load, bench_engine, bundled_prompts, random_prompts
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from engine.runner import Engine

WAYS = (("auto", True), ("sdpa", True), ("auto", False), ("sdpa", False))
"""attention.backend, engine.compile"""
OTHER = {"eager": "sdpa", "sdpa": "eager"}
"""Of transformers' attentions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What transformers made of `prompts` `[prompts, tokens]`: `tokens` `[steps, prompts]`, and the
    `logits` before each, fp32 `[steps, prompts, vocab]`, as are the `exact` ones.

    `another_order`, `another_attention` and `error`: how far these, and fp32, are from that.
    """

    prompts: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    exact: torch.Tensor
    another_order: float
    another_attention: float
    another_next: float

    @property
    def error(self) -> float:
        return apart(self.logits, self.exact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`apart` and `error`: root mean squares of the logits' differences from transformers' and from
    fp32's, given the same text. `same_until`: of the tokens that are made freely, those before the
    first that differs.
    """

    apart: float
    error: float
    same_next: float
    same_until: float


def reordered(model: Any, seed: int = 1) -> Any:
    """A Llama with its hidden and inner dimensions permuted: the same function."""
    draw = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    hidden = torch.randperm(model.config.hidden_size, generator=draw)
    _permute(other.model.embed_tokens, 1, hidden)
    _permute(other.model.norm, 0, hidden)
    if other.lm_head.weight is not other.model.embed_tokens.weight:
        _permute(other.lm_head, 1, hidden)
    for layer in other.model.layers:
        inner = torch.randperm(model.config.intermediate_size, generator=draw)
        _permute_layer(layer, hidden, inner)
    return other


def _permute_layer(layer: Any, hidden: torch.Tensor, inner: torch.Tensor) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        _permute(norm, 0, hidden)
    for into in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
        _permute(into, 1, hidden)
    for out in (attention.o_proj, mlp.down_proj):
        _permute(out, 0, hidden)
    for gate in (mlp.gate_proj, mlp.up_proj):
        _permute(gate, 0, inner)
    _permute(mlp.down_proj, 1, inner)


def _permute(module: Any, dim: int, order: torch.Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(module.weight.index_select(dim, order))


@torch.inference_mode()
def write_text(folder: Path, prompts: torch.Tensor, steps: int, attention: str = "eager") -> Text:
    """By transformers with this attention of its own."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    ).eval()
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    whole = made.sequences[:, :-1]
    one, other, exact = (
        _logits(part, whole, steps)
        for part in (model, reordered(model), copy.deepcopy(model).float())
    )
    model.set_attn_implementation(OTHER[attention])
    by_other_attention = _logits(model, whole, steps)
    return Text(
        prompts=prompts,
        tokens=made.sequences[:, prompts.shape[1] :].T,
        logits=torch.stack(made.logits).float(),
        exact=exact,
        another_order=apart(one, other),
        another_attention=apart(one, by_other_attention),
        another_next=_share(one.argmax(-1) == other.argmax(-1)),
    )


def _logits(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Before each of the last `steps` tokens, `[steps, prompts, vocab]`."""
    logits: torch.Tensor = model(input_ids=ids, logits_to_keep=steps).logits
    return logits.float().transpose(0, 1)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).pow(2).mean().sqrt())


def _share(same: torch.Tensor) -> float:
    return float(same.float().mean())


def agreement(engine: Engine, text: Text) -> Agreement:
    steps, prompts = text.tokens.shape
    load = Load(prompts=prompts, prompt_tokens=text.prompts.shape[1], output_tokens=steps - 1)
    run = Handoff(engine, text.prompts, load)
    own_first = run.first
    run.first = text.tokens[0]
    forced = run.decode(received=False, forced=text.tokens[1:])
    run.first = own_first
    free = run.decode(received=False).tokens
    same = torch.cat([own_first[None], free]) == text.tokens
    return Agreement(
        apart=apart(forced.logits, text.logits[1:]),
        error=apart(forced.logits, text.exact[1:]),
        same_next=_share(forced.tokens == text.tokens[1:]),
        same_until=_share(same.cumprod(0)),
    )


def rows(
    name: str, folder: Path, prompts: torch.Tensor, load: Load, reference: str
) -> Iterator[Row]:
    text = write_text(folder, prompts, load.output_tokens, reference)
    method = (
        f"{load.prompts} prompts of {load.prompt_tokens} tokens, {load.output_tokens} greedy "
        f"tokens, bf16, beside transformers' {reference} generate; in another order of summation "
        f"its own next token is the same in {text.another_next:.1%} of places"
    )
    for attention, compiled in WAYS:
        found = agreement(bench_engine(folder, load, attention=attention, compiled=compiled), text)
        way = f"{name}, attention {attention}, compile {'auto' if compiled else 'off'}"
        beside = (
            ("", found.apart, "two orders of summation", text.another_order),
            ("", found.apart, "transformers' two attentions", text.another_attention),
            (" from fp32's", found.error, "transformers' own", text.error),
        )
        for what, value, against, peer in beside:
            yield Row(
                name=f"{way}: logits apart{what}",
                value=value,
                unit="",
                against=against,
                against_value=peer,
                lower_is_better=True,
                method=method,
            )
        yield _percent(f"{way}: next token the same", found.same_next, method)
        steps = load.output_tokens
        yield _percent(f"{way}: of {steps} tokens, before one differs", found.same_until, method)


def _percent(name: str, share: float, method: str) -> Row:
    return Row(name=name, value=100 * share, unit="%", method=method)


def measure(load: Load, reference: str) -> Sequence[Row]:
    found = [*rows("bundled", checkpoint_path(), bundled_prompts(load), load, reference)]
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), SMOLLM_135M)
        return [*found, *rows("random SmolLM-135M", folder, random_prompts(load), load, reference)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument(
        "--reference", choices=OTHER, default="eager", help="transformers' attention"
    )
    args = parser.parse_args()
    table = measure(
        Load(
            prompts=args.prompts, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens
        ),
        args.reference,
    )
    print_table("Agreement with transformers", table)
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
