"""A checkpoint's files are checked before anything is loaded; every error is one line."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.checkpoint import INDEX, SINGLE, find_text_files, open_checkpoint
from kvrelay.errors import ModelError
from tests.models import VOCAB_SIZE, random_checkpoint


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


QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "mxfp4": {},
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"bits": 4, "group_size": 128},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
    "bitsandbytes": {"load_in_4bit": True},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_refused_by_the_name_of_their_format(folder: Path, kind: str) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": kind, **QUANTISED[kind]})
    message = refusal(folder)
    assert f"weights that are quantised ({kind}), which kvrelay can't load" in message
    assert "use the float16 or bfloat16 checkpoint" in message
    with pytest.raises(ModelError, match="are quantised"):
        find_text_files(str(folder))


def test_the_class_that_writes_16_bit_weights_is_named(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    assert "Mxfp4Config(dequantize=True)" in refusal(folder)


def test_a_quantised_language_model_and_an_unnamed_format_are_refused(folder: Path) -> None:
    inner = {"quantization_config": {"quant_method": "fp8"}}
    edit_json(folder / "config.json", text_config=inner)
    assert "quantised (fp8)" in refusal(folder)
    edit_json(folder / "config.json", text_config=None, quantization={"bits": 4})
    assert "quantised (in an unknown format)" in refusal(folder)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")], ids=str
)
def test_quantised_weights_are_refused_though_the_configuration_says_nothing(
    folder: Path, dtype: torch.dtype, name: str
) -> None:
    """Without their scales they would load as other weights."""
    tensors = load_file(folder / SINGLE)
    some = next(key for key in sorted(tensors) if key.endswith("up_proj.weight"))
    tensors[some] = tensors[some].to(dtype)
    save_file(tensors, folder / SINGLE)
    assert f"weights that are quantised (tensors of {name}), which" in refusal(folder)


def test_masks_and_numbers_beside_the_weights_are_fine(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    beside = [torch.ones(2, dtype=one) for one in (torch.uint8, torch.bool, torch.int64)]
    tensors |= {f"beside.{i}": one for i, one in enumerate(beside)}
    tensors["beside.double"] = torch.ones(2, dtype=torch.float64)
    save_file(tensors, folder / SINGLE)
    open_checkpoint(str(folder))


def test_facts(folder: Path) -> None:
    found = open_checkpoint(str(folder))
    assert found.architecture == "LlamaForCausalLM"
    assert found.vocab_size == VOCAB_SIZE
    assert found.max_position_embeddings == 1024
    assert found.weight_bytes == sum(t.nbytes for t in load_file(folder / SINGLE).values())


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


def test_the_router_needs_no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert find_text_files(str(folder)) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        find_text_files(str(folder))


HUB = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"a second copy",
}


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a snapshot of one revision takes."""

    def do_GET(self) -> None:
        names = [{"rfilename": name} for name in HUB]
        info = {"id": "some-owner/some-model", "sha": "a" * 40, "siblings": names}
        tree = [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in HUB.items()]
        if "/resolve/" in self.path:
            self._send(HUB[self.path.rpartition("/")[2]])
        else:
            self._send(json.dumps(tree if "/tree/" in self.path else info).encode())

    do_HEAD = do_GET  # noqa: N815

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("opener", "fetched"),
    [
        ("find_text_files", {"config.json", "tokenizer.json"}),
        ("open_checkpoint", {"config.json", "tokenizer.json", "model.safetensors"}),
    ],
)
def test_only_what_is_needed_is_fetched(
    opener: str, fetched: set[str], hub: str, tmp_path: Path
) -> None:
    code = (
        f"from engine.model.checkpoint import {opener} as opener\n"
        "try: opener('some-owner/some-model')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "names no architecture" in ran.stdout, ran
    found = tmp_path.glob("hub/models--*/snapshots/*/*")
    assert {path.name for path in found} == fetched


@pytest.mark.processes
def test_unreachable_hub() -> None:
    """The hub's real client, against a port where no one listens."""
    code = (
        "from engine.model.checkpoint import open_checkpoint\n"
        "try: open_checkpoint('some-owner/some-model')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.startswith("ModelError some-owner/some-model: no such folder"), ran
    assert "can't be reached" in ran.stdout


@pytest.mark.processes
def test_needs_no_torch() -> None:
    code = (
        "import sys, engine.model.checkpoint; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
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
