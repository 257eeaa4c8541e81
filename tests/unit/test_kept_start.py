"""The second start of a model needs none of transformers' code, and has the same tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine import kept_start
from engine.core.sizing import EngineLimits
from engine.device.kept_files import cache_folder
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from tests.drive import run_mixed, start
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

CHUNK_TOKENS, TOKENS = 64, 24
KEPT = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss")
"""Families whose parameters are tensors of the checkpoint."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test's own, but for compiled libraries."""
    native, folder = cache_folder() / "native", tmp_path / "cache" / "kvrelay"
    native.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, parents=True)
    (folder / "native").symlink_to(native)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder


def started(folder: Path, dtype: str = "float32", *, fingerprint: str = "") -> Engine:
    """`fingerprint`: instead of the checkpoint's own."""
    found = open_checkpoint(str(folder))
    limits = EngineLimits(
        max_model_len=None, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=4
    )
    return load_engine(
        replace(found, fingerprint_source=fingerprint or found.fingerprint_source),
        device="cpu",
        dtype=dtype,
        block_size=16,
        blocks=64,
        limits=limits,
        reuses_starts=True,
    )


def is_kept(engine: Engine) -> bool:
    return engine.model.recording is not None


def tokens_of(engine: Engine) -> list[list[int]]:
    sequences = start(engine, PROMPTS, max_tokens=TOKENS)
    run_mixed(engine, sequences, chunk_tokens=CHUNK_TOKENS)
    return [one.emitted for one in sequences]


_letters = random.Random(5)
PROMPTS = [[_letters.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 150)]


@pytest.mark.parametrize("family", KEPT)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / family, family)
    first, second = started(folder), started(folder)
    assert (is_kept(first), is_kept(second)) == (False, True)
    references = [generate_reference(first.model, p, tokens=TOKENS) for p in PROMPTS]
    for reference, emitted in zip(references, tokens_of(second), strict=True):
        assert_same_tokens(reference, emitted)
    assert second.layout == first.layout
    assert second.facts == first.facts
    assert second.model.weight_bytes == first.model.weight_bytes


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    first, second = started(folder, "bfloat16"), started(folder, "bfloat16")
    assert is_kept(second)
    assert second.model.weight_bytes == first.model.weight_bytes
    assert tokens_of(second) == tokens_of(first)


def test_what_only_transformers_can_make_is_made_by_it(tmp_path: Path) -> None:
    """It joins the weights of experts, which the checkpoint has apart."""
    folder = random_checkpoint(tmp_path / "mixtral", "mixtral")
    first, second = started(folder), started(folder)
    assert not is_kept(second)
    assert tokens_of(second) == tokens_of(first)


def test_other_settings_have_a_start_of_their_own(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "llama", "llama")
    started(folder)
    assert not is_kept(started(folder, "bfloat16"))
    assert is_kept(started(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert not is_kept(started(folder))


def test_other_weights_are_noticed_and_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if another training had the sampled bytes of this one."""
    folder = random_checkpoint(tmp_path / "llama", "llama")
    (file,) = folder.glob("*.safetensors")
    first = started(folder, fingerprint="same")
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] *= -1
    save_file(weights, file, {"format": "pt"})
    other = started(folder, fingerprint="same")
    assert not is_kept(other)
    assert "is made anew" in caplog.text
    references = [generate_reference(other.model, p, tokens=TOKENS) for p in PROMPTS]
    assert tokens_of(other) != tokens_of(first)
    for reference, emitted in zip(references, tokens_of(other), strict=True):
        assert_same_tokens(reference, emitted)
    assert is_kept(started(folder, fingerprint="same")), "it is kept in turn"


@pytest.mark.parametrize("harmed", ["start-*.safetensors", "graph-*.json"])
@pytest.mark.parametrize("content", [b"", None], ids=["damaged", "gone"])
def test_a_lost_file_is_made_again(
    harmed: str, content: bytes | None, tmp_path: Path, cache: Path
) -> None:
    folder = random_checkpoint(tmp_path / "llama", "llama")
    first = started(folder)
    (path,) = cache.glob(harmed)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    second = started(folder)
    assert not is_kept(second)
    assert tokens_of(second) == tokens_of(first)
    assert is_kept(started(folder))


def test_old_starts_make_room_for_new_ones(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint(tmp_path / "llama", "llama")
    started(folder)
    (first,) = cache.glob("start-*.safetensors")
    monkeypatch.setattr(kept_start, "_MOST_OF_ALL_BYTES", first.stat().st_size * 5 // 2)
    for dtype in ("bfloat16", "float16"):
        started(folder, dtype)
        assert is_kept(started(folder)), "it is used each time"
    assert len([*cache.glob("start-*.safetensors")]) == 2
    assert not is_kept(started(folder, "bfloat16"))


def test_without_a_cache_folder_each_start_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = random_checkpoint(tmp_path / "llama", "llama")
    assert not any(is_kept(started(folder)) for _ in range(2))


WORKER = """
import sys
import cluster.worker.process
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint

limits = EngineLimits(max_model_len=None, prefill_chunk_tokens=64, max_running_requests=4)
settings = {"device": "cpu", "dtype": "float32", "block_size": 16, "blocks": 64}
checkpoint = open_checkpoint(sys.argv[1])
engine = load_engine(checkpoint, limits=limits, reuses_starts=True, **settings)
print(engine.model.recording is not None, "transformers" in sys.modules)
"""


def test_a_kept_start_imports_no_modelling_code(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "llama", "llama")
    started(folder)
    command = [sys.executable, "-c", WORKER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["True False"], done.stdout + done.stderr
