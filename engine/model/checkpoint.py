"""A Hugging Face checkpoint's files and facts, checked cheaply before anything is loaded.

Needs neither torch nor transformers, so the router uses it too. Safetensors files are checked by
their headers: 8 bytes little endian header length, JSON header, data (huggingface/safetensors
README).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from engine.core.activity import ReportActivity, Stage, StartActivity, unheard
from engine.core.checkpoint_files import ALL_PATTERNS, SECOND_COPIES, TEXT_PATTERNS
from engine.model.hub_cache import HubCache
from kvrelay.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A complete safetensors file. `dtypes` are named as in its header. `fingerprint` covers names,
    shapes and a sample of each tensor's bytes."""

    path: Path
    tensors: frozenset[str]
    dtypes: frozenset[str]
    data_bytes: int
    fingerprint: str


def open_weights(folder: Path) -> tuple[WeightFile, ...]:
    """The checkpoint's weight files, all present and complete. Raises ModelError."""
    index = folder / INDEX
    if index.is_file():
        return _open_sharded(folder, index)
    if (folder / SINGLE).is_file():
        return (_open_file(folder / SINGLE),)
    raise ModelError(
        f"{folder} has no {SINGLE} and no {INDEX}: save the model with "
        "save_pretrained(..., safe_serialization=True)"
    )


def _open_sharded(folder: Path, index: Path) -> tuple[WeightFile, ...]:
    try:
        shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} is not a readable index ({error}): download it again") from None
    absent = sorted({name for name in shards.values() if not (folder / name).is_file()})
    if absent:
        raise ModelError(f"{index} names shards that are absent: {', '.join(absent)}: fetch them")
    files = {name: _open_file(folder / name) for name in sorted(set(shards.values()))}
    for tensor, name in shards.items():
        if tensor not in files[name].tensors:
            raise ModelError(f"{folder / name} lacks the tensor {tensor}: download it again")
    return tuple(files.values())


def _open_file(path: Path) -> WeightFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = _read_header(file, path, size)
        tensors = _parse_header(raw, path)
        data_bytes = max((end for _, _, end in tensors.values()), default=0)
        start = 8 + len(raw)
        if size != start + data_bytes:
            raise ModelError(
                f"{path} is truncated or damaged: its header wants {start + data_bytes} bytes, "
                f"it has {size}: download it again"
            )
        digest = blake2b(raw, digest_size=16)
        for _, begin, end in tensors.values():
            digest.update(_sample(file, start + begin, end - begin))
    return WeightFile(
        path=path,
        tensors=frozenset(tensors),
        dtypes=frozenset(dtype for dtype, _, _ in tensors.values()),
        data_bytes=data_bytes,
        fingerprint=digest.hexdigest(),
    )


def _read_header(file: BinaryIO, path: Path, size: int) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise ModelError(f"{path} is truncated or no safetensors file: download it again")
    return file.read(length)


def _parse_header(raw: bytes, path: Path) -> dict[str, tuple[str, int, int]]:
    """# tensor |-> dtype, and [begin, end) of its bytes in the data"""
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        return {
            name: (entry["dtype"], *entry["data_offsets"])
            for name, entry in sorted(entries.items())
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path} has a damaged safetensors header: download it again") from None


def _sample(file: BinaryIO, offset: int, size: int) -> bytes:
    """Up to 256 bytes from the tensor's middle."""
    file.seek(offset + max(0, size - _SAMPLE_BYTES) // 2)
    return file.read(min(size, _SAMPLE_BYTES))


_ROUTERS_NEED = ("config.json", "tokenizer.json")
_VOLATILE_KEYS = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_QUANTISED_KEYS = ("quantization_config", "compression_config", "quantization")
_QUANTISED_DTYPES = ("F8_", "F6_", "F4", "I8")
"""Prefixes of such dtypes' names in safetensors' headers."""
_DEQUANTISERS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""# format |-> the class of transformers that loads it as 16-bit weights with `dequantize=True`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete causal language model on disk.

    `fingerprint_source` identifies the unquantised weights and the configuration: equal for copies
    of one checkpoint, different for two trainings of one shape.
    """

    path: Path
    name: str
    revision: str | None
    architecture: str
    model_type: str
    vocab_size: int
    max_position_embeddings: int | None
    weights: tuple[WeightFile, ...]
    fingerprint_source: str

    @property
    def weight_bytes(self) -> int:
        return sum(file.data_bytes for file in self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFromPeer:
    """What another worker has given: files of this commit, in this host's hub cache. `folder`: the
    snapshot, if it is complete; else the hub has the rest."""

    commit: str
    folder: Path | None


FetchFromPeers = Callable[[str, str | None], FetchedFromPeer | None]
"""# hub id, revision |-> what others gave; None: nothing"""


def open_checkpoint(
    path_or_hub_id: str,
    revision: str | None = None,
    report: ReportActivity = unheard,
    from_peers: FetchFromPeers | None = None,
) -> Checkpoint:
    """Finds (or fetches from other workers, else from the Hugging Face hub) and checks a
    checkpoint; `report` is called with the progress of a download from the hub.

    Raises ModelError, in one line, when a file is missing or damaged or the model is not causal.
    """
    folder = _find(path_or_hub_id, revision, ALL_PATTERNS, report, from_peers)
    return _open_folder(folder, path_or_hub_id, revision)


def check_model(path_or_hub_id: str, revision: str | None = None) -> None:
    """The checks before weights are fetched: a folder is checked whole; of a hub id only the
    configuration and tokenizer. Raises ModelError like `open_checkpoint`."""
    if Path(path_or_hub_id).expanduser().exists():
        open_checkpoint(path_or_hub_id, revision)
    else:
        find_text_files(path_or_hub_id, revision)


def find_config(path_or_hub_id: str) -> Path:
    """The folder with a checkpoint's configuration: of a hub id nothing else is fetched. Raises
    ModelError like `open_checkpoint`."""
    return _find(path_or_hub_id, None, ("config.json",))


def find_text_files(
    path_or_hub_id: str, revision: str | None = None, report: ReportActivity = unheard
) -> Path:
    """The folder with a checkpoint's configuration and tokenizer, which are enough for a router:
    weights are neither fetched nor opened. Raises ModelError like `open_checkpoint`."""
    folder = _find(path_or_hub_id, revision, TEXT_PATTERNS, report)
    _check_text_files(folder)
    return folder


def _find(
    path_or_hub_id: str,
    revision: str | None,
    patterns: tuple[str, ...],
    report: ReportActivity = unheard,
    from_peers: FetchFromPeers | None = None,
) -> Path:
    folder = Path(path_or_hub_id).expanduser()
    if not folder.exists():
        folder = _fetch(path_or_hub_id, revision, patterns, report, from_peers)
    return folder.absolute()


def _fetch(
    hub_id: str,
    revision: str | None,
    patterns: tuple[str, ...],
    report: ReportActivity,
    from_peers: FetchFromPeers | None,
) -> Path:
    if hub_id.startswith((".", "/", "~")) or hub_id.count("/") > 1:
        raise ModelError(f"{hub_id}: no such folder; give a checkpoint's folder or a hub id")
    given = None
    if from_peers is not None and not _is_cached(hub_id, revision):
        given = from_peers(hub_id, revision)
    if given is None:
        return _fetch_from_hub(hub_id, revision, patterns, report)
    folder = given.folder or _fetch_from_hub(hub_id, given.commit, patterns, report)
    with suppress(OSError):  # then the next start asks again
        HubCache(hub_id).put_ref(revision, given.commit)
    return folder


def _is_cached(hub_id: str, revision: str | None) -> bool:
    """With all weights. Routers of this host fetch only its text files."""
    folder = HubCache(hub_id).find(revision)
    if folder is None or not all((folder / name).is_file() for name in _ROUTERS_NEED):
        return False
    try:
        return bool(open_weights(folder))
    except (ModelError, OSError):
        return False


def _fetch_from_hub(
    hub_id: str, revision: str | None, patterns: tuple[str, ...], report: ReportActivity
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from engine.model.download import bars_for

    report(StartActivity(stage=Stage.DOWNLOADS))
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=SECOND_COPIES,
                tqdm_class=bars_for(report),
            )
        )
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
    config, architecture = _check_text_files(folder)
    weights = open_weights(folder)
    check_dtypes(folder, weights)
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
        weights=weights,
        fingerprint_source=_fingerprint(config, weights),
    )


def _check_text_files(folder: Path) -> tuple[dict[str, object], str]:
    """Checks the configuration and the architecture that it names."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give the folder that holds config.json")
    config, architecture = check_config(folder)
    _check_tokenizer(folder)
    return config, architecture


def check_config(folder: Path) -> tuple[dict[str, object], str]:
    """A checkpoint's configuration, and the architecture that it names. Raises ModelError when it
    can't be read, or is not that of a causal language model in 16 or 32 bits."""
    config = read_config(folder)
    architecture = _causal_architecture(folder, config)
    _check_unquantised(folder, config)
    _vocab_size(folder, config)
    return config, architecture


def read_config(folder: Path) -> dict[str, object]:
    """A checkpoint's configuration, unchecked. Raises ModelError when it can't be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: it is not a checkpoint")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, object]:
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
            f"{folder} can't be served (architecture check): a {architecture} is no causal "
            "language model: kvrelay serves decoder-only ...ForCausalLM checkpoints"
        )
    return architecture


def _check_unquantised(folder: Path, config: Mapping[str, object]) -> None:
    found = _quantised_format(config)
    if found is not None:
        raise _quantised(folder, found)


def check_dtypes(folder: Path, weights: tuple[WeightFile, ...]) -> None:
    """The configuration of some quantised checkpoints doesn't mention it. Raises ModelError."""
    dtypes = {dtype for file in weights for dtype in file.dtypes}
    if found := sorted(dtype for dtype in dtypes if dtype.startswith(_QUANTISED_DTYPES)):
        raise _quantised(folder, f"tensors of {', '.join(found)}")


def _quantised(folder: Path, found: str) -> ModelError:
    advice = "use the float16 or bfloat16 checkpoint of this model"
    if found in _DEQUANTISERS:
        advice += f", or write one with transformers' {_DEQUANTISERS[found]}(dequantize=True)"
    return ModelError(
        f"{folder} holds weights that are quantised ({found}), which kvrelay can't load: {advice}"
    )


def _quantised_format(config: Mapping[str, object]) -> str | None:
    """The name of the format, also if only the language model's part is quantised."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for key in _QUANTISED_KEYS:
            if found := part.get(key):
                named = found.get("quant_method") if isinstance(found, Mapping) else None
                return str(named or "in an unknown format")
    return None


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, else of config.json. Raises
    ModelError when such a file is not a JSON object."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = _read_object(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)  # type: ignore[arg-type]
    return ()


def _check_tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: save a fast tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def _vocab_size(folder: Path, config: Mapping[str, object]) -> int:
    size = _first_int(config, "vocab_size")
    if size is None:
        raise ModelError(
            f"{folder} can't be served (architecture check): its config.json has no vocab_size: it "
            "is not a text model"
        )
    return size


def _first_int(config: Mapping[str, object], *keys: str) -> int | None:
    return next((v for key in keys if isinstance(v := config.get(key), int)), None)


def _fingerprint(config: Mapping[str, object], weights: tuple[WeightFile, ...]) -> str:
    essentials = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest = blake2b(json.dumps(essentials, sort_keys=True).encode(), digest_size=16)
    for file in weights:
        digest.update(file.fingerprint.encode())
    return digest.hexdigest()
