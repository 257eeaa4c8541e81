"""A Hugging Face checkpoint's files and facts, checked cheaply before anything is loaded.

Needs neither torch nor transformers, so the router uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from engine.safetensors_files import WeightFile, open_weights
from kvrelay.errors import ModelError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_VOLATILE_KEYS = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What generation_config.json asks for where a request says nothing; None: it doesn't say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete causal language model on disk.

    `fingerprint_source` identifies the unquantised weights and the configuration: equal for
    copies of one checkpoint, different for two trainings of one shape.
    """

    path: Path
    name: str
    revision: str | None
    architecture: str
    model_type: str
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    weights: tuple[WeightFile, ...]
    fingerprint_source: str

    @property
    def weight_bytes(self) -> int:
        return sum(file.data_bytes for file in self.weights)


def open_checkpoint(path_or_hub_id: str, revision: str | None = None) -> Checkpoint:
    """Find (or fetch from the Hugging Face hub) and check a checkpoint.

    Raises ModelError, in one line, when a file is missing or damaged or the model is not causal.
    """
    folder = Path(path_or_hub_id).expanduser()
    if not folder.exists():
        folder = _fetch(path_or_hub_id, revision)
    return _open_folder(folder.absolute(), path_or_hub_id, revision)


def _fetch(hub_id: str, revision: str | None) -> Path:
    if hub_id.startswith((".", "/", "~")) or hub_id.count("/") > 1:
        raise ModelError(f"{hub_id}: no such folder; give a checkpoint's folder or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_PATTERNS))
    except HFValidationError:
        raise ModelError(f"{hub_id}: neither a folder here nor a valid hub id") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{hub_id}: no such folder, and the Hugging Face hub can't be reached: give a local "
            "folder or check the network"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"{hub_id}: no such folder, and the hub refused it ({_first_line(error)}): check the "
            "name, the revision and your token"
        ) from None
    except OSError as error:
        raise ModelError(f"{hub_id}: can't be fetched from the hub: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _open_folder(folder: Path, name: str, revision: str | None) -> Checkpoint:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give the folder that holds config.json")
    config = _read_json(folder / "config.json", required=True)
    architecture = _causal_architecture(folder, config)
    _check_tokenizer(folder)
    weights = open_weights(folder)
    generation = _read_json(folder / "generation_config.json", required=False)
    return Checkpoint(
        path=folder,
        name=name,
        revision=revision,
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        vocab_size=_vocab_size(folder, config),
        max_position_embeddings=_first_int(
            config, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"
        ),
        eos_token_ids=_eos_ids(generation, config),
        generation=_defaults(generation),
        weights=weights,
        fingerprint_source=_fingerprint(config, weights),
    )


def _read_json(path: Path, *, required: bool) -> dict[str, object]:
    if not path.is_file():
        if required:
            raise ModelError(f"{path.parent} has no {path.name}: it is not a checkpoint")
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object: download it again")
    return content


def _causal_architecture(folder: Path, config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(f"{folder}/config.json names no architecture: set `architectures`")
    architecture = str(names[0])
    if not architecture.endswith(_CAUSAL_SUFFIXES):
        raise ModelError(
            f"{folder} holds a {architecture}, which is no causal language model: kvrelay serves "
            "decoder-only ...ForCausalLM checkpoints"
        )
    return architecture


def _check_tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: save a fast tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def _vocab_size(folder: Path, config: Mapping[str, object]) -> int:
    size = _first_int(config, "vocab_size")
    if size is None:
        raise ModelError(f"{folder}/config.json has no vocab_size: it is not a text model")
    return size


def _first_int(config: Mapping[str, object], *keys: str) -> int | None:
    return next((v for key in keys if isinstance(v := config.get(key), int)), None)


def _eos_ids(*configs: Mapping[str, object]) -> tuple[int, ...]:
    """The first that says; an id or a list of ids."""
    for config in configs:
        match config.get("eos_token_id"):
            case int(one):
                return (one,)
            case list(many):
                return tuple(many)
    return ()


def _defaults(generation: Mapping[str, object]) -> GenerationDefaults:
    """`do_sample` false means greedy, whatever temperature says."""

    def number(key: str) -> float | None:
        value = generation.get(key)
        return float(value) if isinstance(value, int | float) else None

    greedy = generation.get("do_sample") is False
    return GenerationDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_p=number("top_p"),
        top_k=_first_int(generation, "top_k"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        max_new_tokens=_first_int(generation, "max_new_tokens"),
    )


def _fingerprint(config: Mapping[str, object], weights: tuple[WeightFile, ...]) -> str:
    essentials = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest = blake2b(json.dumps(essentials, sort_keys=True).encode(), digest_size=16)
    for file in weights:
        digest.update(file.fingerprint.encode())
    return digest.hexdigest()
