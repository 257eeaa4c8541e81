"""What becomes of one family: its tokens equal transformers' own, or a check refuses it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.core.sizing import EngineLimits
from engine.family.allowed import check_family
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvrelay.errors import ModelError
from tests.drive import run_forced, run_mixed, start
from tests.families.kit import family_config, write_no_weights, write_weights
from tests.models import VOCAB_SIZE, save_tokenizer
from tests.reference import Reference, assert_close_logits, assert_same_tokens, generate_reference

EXACT = "exact"
LOADING = "loading"
"""transformers itself can't build the model."""
_LENGTHS, _TOKENS, _CHUNK_TOKENS = (17, 300), 16, 64
_LIMITS = EngineLimits(
    max_model_len=1024, prefill_chunk_tokens=_CHUNK_TOKENS, max_running_requests=4
)


def outcome(family: str, folder: Path, *, compiled: bool = True) -> str:
    """EXACT, or which check refuses it. Raises AssertionError when its tokens are wrong."""
    try:
        _check_files(family, folder)
        engine = load_engine(
            open_checkpoint(str(folder)),
            device="cpu",
            dtype="float32",
            block_size=16,
            blocks=64,
            limits=_LIMITS,
            compiled=compiled,
        )
    except ModelError as error:
        return check_named(str(error))
    letters = random.Random(5)
    prompts = [[letters.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in _LENGTHS]
    references = [generate_reference(engine.model, prompt, tokens=_TOKENS) for prompt in prompts]
    for reference in references:
        _check_logits(engine, reference)
    _check_tokens(engine, references)
    return EXACT


def family_folder(folder: Path, family: str, **overrides: Any) -> Any:
    """Writes all but the weights; returns the configuration."""
    config = family_config(family, **overrides)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return config


def _check_files(family: str, folder: Path) -> None:
    """What is refused by its configuration needs no weights."""
    config = family_folder(folder, family)
    write_no_weights(folder)
    open_checkpoint(str(folder))
    check_family(config)
    write_weights(folder)


def check_named(message: str) -> str:
    if "can't be loaded on" in message:
        return LOADING
    found = re.search(r"can't be served \((.+?) check\): ", message)
    assert found is not None, f"no check is named: {message}"
    return found[1]


def _check_logits(engine: Engine, reference: Reference) -> None:
    (one,) = start(engine, [reference.prompt], max_tokens=_TOKENS)
    logits = run_forced(engine, one, reference.tokens, chunk_tokens=_CHUNK_TOKENS)
    spread = float(reference.logits.max() - reference.logits.min())
    assert_close_logits(reference, logits, within=1e-4 * max(1.0, spread))


def _check_tokens(engine: Engine, references: list[Reference]) -> None:
    sequences = start(engine, [r.prompt for r in references], max_tokens=_TOKENS)
    run_mixed(engine, sequences, chunk_tokens=_CHUNK_TOKENS)
    for reference, one in zip(references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)
