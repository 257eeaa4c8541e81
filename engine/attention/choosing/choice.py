"""Chooses the attention backend: the configured one, or with "auto" the best that works here.

A backend that can't serve the model on its device is refused when the worker starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from engine.attention.backend import Backend, GroupShape
from engine.attention.choosing.needs import NEEDS, Wanted
from engine.model.kv_layout import LayerShape, layer_places
from engine.model.model import Model
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.errors import ModelError

Places = Mapping[int, tuple[int, int]]
OpenBackend = Callable[[KvMemory, tuple[GroupShape, ...], Places], Backend]

TORCH = "sdpa"
_ON_CUDA, _ON_CPU = ("triton", "flashinfer", "flash"), ("native",)


class _Listed(NamedTuple):
    """The module is imported when it is used. `copies_kv`: each layer's KV is gathered before."""

    module: str
    kind: str
    copies_kv: bool = False


_BACKENDS = {
    "native": _Listed("engine.attention.native.backend", "NativeBackend"),
    "triton": _Listed("engine.attention.triton.backend", "TritonBackend"),
    "flashinfer": _Listed("engine.attention.cuda.flashinfer", "FlashInferBackend"),
    "flash": _Listed("engine.attention.cuda.flash", "FlashBackend"),
    TORCH: _Listed("engine.attention.torch_paged", "SdpaBackend", copies_kv=True),
}


def group_shapes(layout: KvLayout, layers: Mapping[int, LayerShape]) -> tuple[GroupShape, ...]:
    """# layer group |-> its shape"""
    shapes = []
    for group in layout.groups:
        first = layers[group.layers[0]]
        key, value = group.planes
        shapes.append(
            GroupShape(
                query_heads=first.query_heads,
                kv_heads=key.heads,
                dim=key.dim,
                value_dim=value.dim,
                window=group.window,
                has_softcap=any(layers[i].has_softcap for i in group.layers),
                has_sinks=any(layers[i].has_sinks for i in group.layers),
            )
        )
    return tuple(shapes)


def choose(name: str, wanted: Wanted) -> tuple[str, ...]:
    """`name` is a key of the table above, or "auto", which may give several: the first unless
    decode steps of another are faster. Plain torch is there for what nothing else serves. Raises
    ModelError that names the YAML key."""
    if name != "auto":
        reason = NEEDS[name](wanted)
        if reason is not None:
            raise ModelError(f"attention.backend: {name} can't be used: {reason}, or use auto")
        return (name,)
    preferred = _ON_CUDA if wanted.on_cuda else _ON_CPU
    found = tuple(name for name in preferred if NEEDS[name](wanted) is None)
    return found or choose(TORCH, wanted)


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """`open` creates the backend over a memory; None: the engine uses its own torch operations."""

    name: str
    open: Callable[[KvMemory], Backend | None]

    @property
    def copies_kv(self) -> bool:
        """True if each layer's KV is gathered before it is used."""
        return _BACKENDS[self.name].copies_kv


def choose_backends(
    name: str, model: Model, layout: KvLayout, layers: Mapping[int, LayerShape]
) -> tuple[ChosenBackend, ...]:
    """Like `choose`. Raises ModelError."""
    shapes = group_shapes(layout, layers)
    wanted = Wanted(device=model.device, dtype=model.dtype, layout=layout, groups=shapes)
    places = layer_places(layout)
    return tuple(_chosen(name, shapes, places) for name in choose(name, wanted))


def _chosen(name: str, shapes: tuple[GroupShape, ...], places: Places) -> ChosenBackend:
    if name == TORCH:
        return ChosenBackend(name, lambda memory: None)
    return ChosenBackend(name, lambda memory: opener(name)(memory, shapes, places))


def opener(name: str) -> OpenBackend:
    listed = _BACKENDS[name]
    found: OpenBackend = getattr(import_module(listed.module), listed.kind)
    return found
