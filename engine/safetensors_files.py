"""Checks safetensors files by their headers, without loading them. Needs no torch.

Format: 8 bytes little endian header length, JSON header, data (huggingface/safetensors README).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from kvrelay.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A complete safetensors file. `dtypes` are as its header names them. `fingerprint` covers
    names, shapes and a sample of each tensor's bytes."""

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
