"""What a training run is measured by: the loss on chapters never trained on, and samples; and the
model card that tells it."""

import math
from dataclasses import asdict, dataclass

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from bench.bundled_model.corpus import Document, encode_document
from bench.bundled_model.model import (
    BOS,
    CONTEXT_TOKENS,
    EOS,
    SAMPLING,
    Recipe,
    in_bfloat16,
    token_id,
)

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


CARD = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The bundled model of kvrelay

A very small Llama, trained from nothing on public-domain English, so that `kvrelay serve` speaks
without a download. It writes English in the manner of old books and knows nothing of the world.

## What it is for, and what not

For trying the server, for demonstrations and for tests that want text and not noise. It is **not**
for answering questions, for facts, for advice or for any product: it makes things up, it forgets
what was said a few lines before, and it repeats the views of the 17th to 19th centuries that its
texts hold. Nothing was filtered, and it was not aligned. Speed measured with it says nothing about
models of a useful size.

## Data

| text | Debian package | share of the text |
|---|---|---|
| The Bible, King James Version (1611) | `bible-kjv-text`, read by `bible-kjv` | 51 % |
| The six novels of Jane Austen (1811-1818) | `r-cran-janeaustenr` | 49 % |
| Declaration of Independence, Constitution of the United States | `miscfiles` | under 1 % |

The texts are in the public domain (in the United Kingdom the Crown holds a patent on printing the
King James Version). They are not part of the repository: the training script reads them from the
installed packages. About a sixth of the training tokens are conversations cut out of the same texts
(continue a passage, tell about a word, what two people of a novel say to each other), and a few
greetings and answers about itself that were written for it (`bench/bundled_model/corpus.py`).

The weights carry the licence of the repository that they come with.

## Architecture

`LlamaForCausalLM`, {parameters:,} parameters, bf16, embedding tied to the output.

| layers | hidden | MLP | heads | KV heads | head size | vocabulary | context |
|---|---|---|---|---|---|---|---|
| {num_hidden_layers} | {hidden_size} | {intermediate_size} | {num_attention_heads} \
| {num_key_value_heads} | {head_dim} | {vocab_size:,} | {max_position_embeddings:,} tokens |

RoPE with base 10,000. The tokenizer is a byte-level BPE trained on the same text: any UTF-8 text
comes back unchanged. A prompt begins with `<|begin|>`; a text ends with `<|endoftext|>`, a turn of
a conversation with `<|end|>`.

## Training

- {steps:,} steps of {tokens_per_step:,} tokens: {tokens_seen:.1f} million in all, \
ending in pass {epochs} over the text
- one step in {long_every} reads windows of the full context, \
the others windows of {short_tokens} tokens
- Muon for the matrices, AdamW for the rest; warm-up and cosine; forward pass in bf16
- seed {seed}; {minutes:.0f} minutes on one CPU thread

## Held-out loss

{held_out_documents} whole chapters ({held_out_tokens:,} tokens), chosen by the seed, were never \
trained on.

| window | loss, nats per token | perplexity | bits per byte |
|---|---|---|---|
| {short_tokens} tokens | {short_loss:.3f} | {short_perplexity:.1f} | {short_bits:.2f} |
| {max_position_embeddings:,} tokens | {long_loss:.3f} | {long_perplexity:.1f} | {long_bits:.2f} |

A model that knows nothing has a loss of ln({vocab_size:,}) = {uniform_loss:.2f}.

## Samples

Temperature 0.7, top-p 0.9, seed {seed}, the first draw of each:

{sample_list}

## How to retrain

    apt-get install bible-kjv bible-kjv-text r-cran-janeaustenr miscfiles
    python -m bench.bundled_model.train --out DIR

The same versions of the packages and the same kind of CPU give the same weights.
"""


def render_card(config: LlamaConfig, result: Result) -> str:
    """The card in Markdown."""
    tokens_per_byte = result.held_out_tokens / result.held_out_bytes
    return CARD.format(
        **{**config.to_dict(), **asdict(result)},
        tokens_seen=result.steps * result.tokens_per_step / 1e6,
        short_perplexity=math.exp(result.short_loss),
        long_perplexity=math.exp(result.long_loss),
        short_bits=result.short_loss / math.log(2) * tokens_per_byte,
        long_bits=result.long_loss / math.log(2) * tokens_per_byte,
        uniform_loss=math.log(config.vocab_size),
        sample_list="\n".join(_sample(*sample) for sample in result.samples),
    )


def _sample(prompt: str, continuation: str) -> str:
    return f"- **{prompt}** {' '.join(continuation.split())}"
