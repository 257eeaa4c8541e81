"""Train the bundled checkpoint on a CPU: `python -m bench.bundled_model.train --out DIR`.

One thread, one seed, a fixed number of steps: the same versions on the same kind of machine give
the same weights. This module decides the optimiser and runs the loop; what the model reads is in
`corpus.py`, its shape and the numbers of the run in `model.py`.

Matrices are trained with Muon (Keller Jordan, "Muon: an optimizer for hidden layers in neural
networks", 2024; `torch.optim.Muon`), the embedding and the norms with AdamW.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bench.bundled_model.corpus import TokenStream, load_corpus, split_held_out
from bench.bundled_model.evaluate import Result, measure, render_card
from bench.bundled_model.model import Recipe, new_model, save, train_tokenizer

REPORT_EVERY = 25


def new_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for everything else."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.matrix_lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def train(
    model: LlamaForCausalLM, stream: TokenStream, recipe: Recipe
) -> Iterator[tuple[int, float]]:
    """Run the recipe; yields (steps done, smoothed training loss in nats per token)."""
    optimizers = new_optimizers(model, recipe)
    peaks = [[group["lr"] for group in opt.param_groups] for opt in optimizers]
    smoothed = math.log(recipe.vocab_size)
    model.train()
    for step in range(recipe.steps):
        length = recipe.window_tokens(step)
        loss = _backward(model, stream.windows(recipe.tokens_per_step // length, length))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lrs in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = peak * recipe.lr_fraction(step)
            optimizer.step()
            optimizer.zero_grad()
        smoothed += (loss - smoothed) * 0.05
        yield step + 1, smoothed


def _backward(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return float(loss.item())


def run(out: Path, recipe: Recipe) -> Result:
    """Train from nothing and write the checkpoint, with its model card, into `out`."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    started_s = time.monotonic()
    documents, held_out = split_held_out(
        load_corpus(), every=recipe.hold_out_every, seed=recipe.seed
    )
    tokenizer = train_tokenizer((doc.text for doc in documents), vocab_size=recipe.vocab_size)
    model = new_model(tokenizer)
    stream = TokenStream(documents, tokenizer, random.Random(recipe.seed))
    print(f"{model.num_parameters():,} parameters, {len(documents)} documents", flush=True)
    for done, loss in train(model, stream, recipe):
        if done % REPORT_EVERY == 0:
            elapsed_s = time.monotonic() - started_s
            print(
                f"step {done}  epoch {stream.epoch}  loss {loss:.3f}  {elapsed_s:.0f} s", flush=True
            )
        if done % recipe.save_every == 0:
            save(model, tokenizer, out)
    save(model, tokenizer, out)
    minutes = (time.monotonic() - started_s) / 60
    result = measure(model, tokenizer, held_out, recipe, epochs=stream.epoch, minutes=minutes)
    (out / "README.md").write_text(render_card(model.config, result), encoding="utf-8")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bundled_model.train", description=__doc__
    )
    default = Recipe()
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=default.steps, help="optimiser steps (default: %(default)s)"
    )
    parser.add_argument(
        "--save-every", type=int, default=default.save_every, help="steps (default: %(default)s)"
    )
    arguments = parser.parse_args()
    recipe = Recipe(seed=arguments.seed, steps=arguments.steps, save_every=arguments.save_every)
    result = run(arguments.out, recipe)
    print(f"held-out loss {result.short_loss:.3f}, at full context {result.long_loss:.3f}")


if __name__ == "__main__":
    main()
