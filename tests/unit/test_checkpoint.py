"""A checkpoint's files are checked before anything is loaded; every error is one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.checkpoint import open_checkpoint
from engine.safetensors_files import INDEX, SINGLE
from kvrelay.errors import ModelError
from tests.models import EOS_ID, VOCAB_SIZE, random_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def shard(folder: Path) -> None:
    """Split the weights over two files with an index."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    where = {name: file for file, members in parts.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_facts(folder: Path) -> None:
    found = open_checkpoint(str(folder))
    assert found.architecture == "LlamaForCausalLM"
    assert found.vocab_size == VOCAB_SIZE
    assert found.max_position_embeddings == 1024
    assert found.eos_token_ids == (EOS_ID,)
    assert found.generation.temperature is None
    assert found.weight_bytes == sum(t.nbytes for t in load_file(folder / SINGLE).values())


def test_generation_defaults_win_over_the_config(folder: Path) -> None:
    edit_json(
        folder / "generation_config.json",
        eos_token_id=[3, 4],
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=20,
    )
    found = open_checkpoint(str(folder))
    assert found.eos_token_ids == (3, 4)
    assert found.generation.temperature == 0.6
    assert found.generation.top_p == 0.9
    assert found.generation.top_k == 20


def test_do_sample_false_is_greedy(folder: Path) -> None:
    edit_json(folder / "generation_config.json", do_sample=False, temperature=0.6)
    assert open_checkpoint(str(folder)).generation.temperature == 0.0


def test_a_sharded_checkpoint_opens(folder: Path) -> None:
    shard(folder)
    assert len(open_checkpoint(str(folder)).weights) == 2


def test_missing_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")


def test_a_file_is_no_folder(folder: Path) -> None:
    assert "is not a folder" in refusal(folder / "config.json")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refusal(folder)


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_not_causal(folder: Path, architecture: str) -> None:
    edit_json(folder / "config.json", architectures=[architecture])
    message = refusal(folder)
    assert architecture in message
    assert "no causal language model" in message


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert f"has no {SINGLE}" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 300, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:keep])
    assert "truncated" in refusal(folder)


def test_damaged_header(folder: Path) -> None:
    content = bytearray((folder / SINGLE).read_bytes())
    content[8:12] = b"oops"
    (folder / SINGLE).write_bytes(content)
    assert "damaged safetensors header" in refusal(folder)


def test_absent_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    assert "absent: b.safetensors" in refusal(folder)


def test_shard_without_its_tensor(folder: Path) -> None:
    shard(folder)
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    assert "lacks the tensor" in refusal(folder)


def test_unreachable_hub() -> None:
    """The hub's real client, against a port where no one listens."""
    code = (
        "from engine.checkpoint import open_checkpoint\n"
        "try: open_checkpoint('some-owner/some-model')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.startswith("ModelError some-owner/some-model: no such folder"), ran
    assert "can't be reached" in ran.stdout


def test_needs_no_torch() -> None:
    code = "import sys, engine.checkpoint; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_fingerprints(original: Path, folder: Path, tmp_path: Path) -> None:
    """Equal for a copy; different for other weights, or other meaning of the same weights."""
    own = open_checkpoint(str(original)).fingerprint_source
    assert open_checkpoint(str(folder)).fingerprint_source == own
    edit_json(folder / "config.json", transformers_version="0", use_cache=False)
    assert open_checkpoint(str(folder)).fingerprint_source == own
    edit_json(folder / "config.json", rms_norm_eps=1e-3)
    assert open_checkpoint(str(folder)).fingerprint_source != own
    other = random_checkpoint(tmp_path / "other", seed=1)
    assert open_checkpoint(str(other)).fingerprint_source != own
