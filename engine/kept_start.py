"""What one start of a model on CPUs learns by transformers' code, kept for the next one.

To import that code takes longer than all else that a small model needs. The next start reads an
outline of the model and its recorded graph instead. It trusts neither: its logits are compared with
those that transformers gave, as at the first start. If they differ, or the checkpoint, a version or
our own code has changed, transformers is used again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from engine.checks.self_check import Loaded, Reference
from engine.compiled.build import Expected
from engine.compiled.recordings import recording_name
from engine.device.kept_files import NotKept, alone, cache_folder, checked, keep, own_folder
from engine.model.checkpoint import Checkpoint
from engine.model.kv_layout import LayerShape
from engine.model.model import Model
from engine.model.outline import NotOutlined, Outline, filled, outline
from kvpool.core.layout.layout import Plane

log = logging.getLogger(__name__)

_ENGINE = Path(__file__).parent
_MOST_BYTES = 256 << 20
_MOST_OF_ALL_BYTES = 1 << 30
"""All kept starts; those that were not used for longest go first."""
_VALUE = "value."


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A loaded model and what it is checked against."""

    loaded: Loaded
    expected: Expected


@dataclass(frozen=True, slots=True)
class KeptStart:
    """One start's place in the cache folder."""

    path: Path
    checkpoint: Checkpoint
    device: torch.device

    def read(self) -> Start | None:
        """None: no start was kept, or it can't be used."""
        try:
            content = checked(self.path)
            self.path.touch()
            return self._start(content)
        except NotKept:
            return None
        except Exception as error:  # whatever is wrong with the file, transformers needs none
            self.drop(error)
            return None

    def drop(self, why: object) -> None:
        """The next start doesn't find it."""
        log.warning("what an earlier start kept in %s is made anew: %s", self.path, why)
        self.path.unlink(missing_ok=True)

    def keep(self, content: bytes) -> None:
        try:
            with alone(self.path):
                keep(self.path, content)
        except OSError as error:
            log.warning("this start is not kept, so the next one takes as long: %s", error)
        with suppress(OSError):  # others make room too
            _make_room(self.path.parent)

    def _start(self, content: bytes) -> Start:
        tensors, plain = load(content), json.loads(_metadata(content)["start"])
        values = {n.removeprefix(_VALUE): t for n, t in tensors.items() if n.startswith(_VALUE)}
        known = Outline(**plain["outline"], values=values)
        model = Model(
            module=filled(known, self.checkpoint.weights, self.device),
            config=known.config,
            device=self.device,
            dtype=getattr(torch, plain["dtype"]),
            recording=plain["recording"],
        )
        shapes = {int(layer): _shape(**told) for layer, told in plain["shapes"].items()}
        reference = Reference(logits=tensors["logits"], bound=plain["reference_bound"])
        return Start(
            loaded=Loaded(model=model, shapes=shapes, own=shapes, reference=reference),
            expected=Expected(rows=tensors["rows"], bound=plain["rows_bound"]),
        )


def _make_room(folder: Path) -> None:
    used_bytes = 0
    for path in sorted(folder.glob("start-*.safetensors"), key=_used_s, reverse=True):
        used_bytes += path.stat().st_size
        if used_bytes > _MOST_OF_ALL_BYTES:
            path.unlink(missing_ok=True)


def _used_s(path: Path) -> float:
    return path.stat().st_mtime


def _shape(planes: list[dict[str, Any]], **others: Any) -> LayerShape:
    return LayerShape(planes=tuple(Plane(**one) for one in planes), **others)


def _metadata(content: bytes) -> Any:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"]


def written(
    start: Start, linears: Iterable[torch.nn.Module], sources: dict[str, str]
) -> bytes | None:
    """Before the model is compiled, which changes its modules. None: there is something that only
    transformers can make. `sources`: # parameter or buffer |-> tensor of the checkpoint"""
    loaded, expected = start.loaded, start.expected
    model = loaded.model
    if model.longrope is not None:
        return None
    try:
        known = outline(model.module, model.config, linears, sources)
        plain = json.dumps(
            {
                "outline": known.plain(),
                "dtype": model.dtype_name,
                "recording": recording_name(model),
                "shapes": {layer: asdict(shape) for layer, shape in loaded.shapes.items()},
                "reference_bound": loaded.reference.bound,
                "rows_bound": expected.bound,
            }
        )
    except (NotOutlined, TypeError) as error:
        log.info("this start is not kept: %s", error)
        return None
    tensors = {f"{_VALUE}{name}": tensor for name, tensor in known.values.items()}
    tensors |= {"logits": loaded.reference.logits, "rows": expected.rows}
    if sum(tensor.nbytes for tensor in tensors.values()) > _MOST_BYTES:
        return None
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    return save(whole, {"start": plain})


def kept_start(
    checkpoint: Checkpoint, device: torch.device, dtype: str, longest: int
) -> KeptStart | None:
    """None: there is no folder to keep it in."""
    name = f"start-{_digest(checkpoint, device, dtype, longest)}.safetensors"
    try:
        return KeptStart(own_folder(cache_folder()) / name, checkpoint, device)
    except OSError:
        return None


def _digest(checkpoint: Checkpoint, device: torch.device, dtype: str, longest: int) -> str:
    config = (checkpoint.path / "config.json").read_text()
    versions = torch.__version__, version("transformers"), _sources()
    told = [checkpoint.fingerprint_source, config, str(device), dtype, longest, *versions]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    """Of all that decides what is kept."""
    found = hashlib.sha256()
    for path in sorted(_ENGINE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
