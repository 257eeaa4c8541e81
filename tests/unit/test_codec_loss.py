"""The benchmark of what codecs lose, on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.kvpool.codec_loss import Load, losses, rows
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from kvpool.core.layout.codec import Codec
from kvpool.core.transfer.codec_choice import encoded_share
from tests.models import VOCAB_SIZE, random_checkpoint

LOAD = Load(prompts=2, prompt_tokens=48, output_tokens=8)


def test_nothing_is_lost_without_a_codec_and_little_with_one(tmp_path: Path) -> None:
    limits = EngineLimits(max_model_len=64, prefill_chunk_tokens=48, max_running_requests=2)
    checkpoint = open_checkpoint(str(random_checkpoint(tmp_path / "llama", "llama")))
    engine = load_engine(
        checkpoint, device="cpu", dtype="float32", block_size=16, blocks=16, limits=limits
    )
    shape = (LOAD.prompts, LOAD.prompt_tokens)
    prompts = torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))
    deviation, found = losses(engine, prompts, LOAD)
    none, *lossy = found
    assert (none.codec, none.most, none.mean, none.kl) == (Codec.NONE, 0, 0, 0)
    assert (none.same_next, none.same_until) == (1, 1)
    assert none.bytes_per_token == engine.layout.bytes_per_token
    for loss in lossy:
        assert 0 < loss.mean < loss.most
        assert 0 < loss.mean < 0.2 * deviation
        assert 0 < loss.kl < 1
        assert loss.same_until <= loss.same_next <= 1
        share = encoded_share(engine.layout, loss.codec)
        assert loss.bytes_per_token == pytest.approx(share * none.bytes_per_token)
    table = [*rows("m", deviation, found, LOAD)]
    assert len({row.name for row in table}) == 6 * len(Codec)
