"""In bf16 our logits are as near to transformers' as its own two attentions are to each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.engine.agreement import WAYS, Text, agreement, apart, reordered, write_text
from bench.kvpool.codec_loss import Load, bench_engine
from engine.bundled import checkpoint_path

LOAD = Load(prompts=2, prompt_tokens=64, output_tokens=48)
BEGINNING = (
    "# kvrelay\n\n**kvrelay serves Hugging Face causal language models with prefill and decode on "
    "separate workers, and\nhands the KV cache from one to the other like a bat"
)
END = (
    " than one model per cluster (several clusters share a Ray); Windows or macOS workers; "
    "encryption of\nits own between the processes of a cluster, which belong on a private "
    "network.\n"
)
"""Fixed, as the docs' text is not."""


def prompts() -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    return torch.tensor([tokenizer.encode(BEGINNING).ids, tokenizer.encode(END).ids[1:]])


@pytest.fixture(scope="module")
def text() -> Text:
    return write_text(checkpoint_path(), prompts(), LOAD.output_tokens)


@pytest.mark.parametrize(("attention", "compiled"), WAYS)
def test_logits_are_within_the_error_of_two_attentions(
    attention: str, compiled: bool, text: Text
) -> None:
    found = agreement(
        bench_engine(checkpoint_path(), LOAD, attention=attention, compiled=compiled), text
    )
    print(f"{found}; {text.another_order=:.3g} {text.another_attention=:.3g} {text.error=:.3g}")
    assert found.error <= 1.05 * text.error
    assert found.apart <= 1.05 * text.another_attention
    assert found.same_next >= text.another_next - 0.03


def test_another_order_is_the_same_function() -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    ids = prompts()
    with torch.inference_mode():
        one, other = (part(input_ids=ids).logits for part in (model, reordered(model)))
    assert 0 < apart(one, other) < 1e-4


def test_a_norm_that_is_off_by_two_hundredths_is_noticed(text: Text, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.mul_(1.02)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint_path() / name).read_bytes())
    found = agreement(bench_engine(tmp_path, LOAD), text)
    assert found.error > 1.05 * text.error
    assert found.apart > 1.05 * text.another_attention
