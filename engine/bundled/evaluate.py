"""What a training run is measured by: the loss on chapters never trained on, and samples."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from engine.bundled.corpus import Document
from engine.bundled.model import CONTEXT_TOKENS, SAMPLING, in_bfloat16
from engine.bundled.recipe import Recipe
from engine.bundled.stream import encode_document
from engine.bundled.tokenizer import BOS, EOS, token_id

PROMPTS = ("It was a fine morning in May, and", "In the beginning", "My dear sister,")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training run measured. Losses are in nats per token, on the stored bf16 weights."""

    seed: int
    parameters: int
    steps: int
    tokens_per_step: int
    epochs: int  # the one in which the run ended, counted from 1
    minutes: float
    held_out_documents: int
    held_out_tokens: int
    held_out_bytes: int
    short_tokens: int
    long_every: int
    short_loss: float
    long_loss: float
    samples: tuple[tuple[str, str], ...]  # (prompt, continuation)


def measure(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    held_out: list[Document],
    recipe: Recipe,
    *,
    epochs: int,
    minutes: float,
) -> Result:
    """Held-out losses and samples of the model as it is stored, with the numbers of the run."""
    stored = in_bfloat16(model)
    return Result(
        seed=recipe.seed,
        parameters=model.num_parameters(),
        steps=recipe.steps,
        tokens_per_step=recipe.tokens_per_step,
        epochs=epochs,
        minutes=minutes,
        held_out_documents=len(held_out),
        held_out_tokens=sum(len(encode_document(tokenizer, doc)) for doc in held_out),
        held_out_bytes=sum(len(doc.text.encode()) for doc in held_out),
        short_tokens=recipe.short_tokens,
        long_every=recipe.long_every,
        short_loss=held_out_loss(stored, tokenizer, held_out, recipe.short_tokens),
        long_loss=held_out_loss(stored, tokenizer, held_out, CONTEXT_TOKENS),
        samples=tuple((p, sample(stored, tokenizer, p, seed=recipe.seed)) for p in PROMPTS),
    )


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, tokenizer: Tokenizer, documents: list[Document], window_tokens: int
) -> float:
    """Mean loss in nats per token over the documents, in windows that each begin with `BOS`."""
    bos = token_id(tokenizer, BOS)
    tokens = [token for doc in documents for token in encode_document(tokenizer, doc)]
    step = window_tokens - 1
    total = count = 0.0
    model.eval()
    for start in range(0, len(tokens) - 1, step):
        window = torch.tensor([[bos, *tokens[start : start + step]]])
        predicted = window.shape[1] - 1
        total += predicted * float(model(input_ids=window, labels=window).loss)
        count += predicted
    model.train()
    return total / count


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, *, seed: int) -> str:
    """A continuation of at most 80 tokens, drawn with the settings of `generation_config.json`."""
    torch.manual_seed(seed)
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    drawn = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        pad_token_id=token_id(tokenizer, EOS),
        max_new_tokens=80,
        **SAMPLING,
    )
    return tokenizer.decode(drawn[0, tokens.shape[1] :].tolist())
