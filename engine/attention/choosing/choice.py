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


def choose(name: str, wanted: Wanted) -> str:
    """`name` is a key of the table above, or "auto". Only decode steps of triton are recorded as
    CUDA graphs, which is worth more than any layer's attention. Raises ModelError that names the
    YAML key."""
    if name != "auto":
        reason = NEEDS[name](wanted)
        if reason is not None:
            raise ModelError(f"attention.backend: {name} can't be used: {reason}, or use auto")
        return name
    best = "triton" if wanted.on_cuda else "native"
    return best if NEEDS[best](wanted) is None else choose(TORCH, wanted)


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """`open` creates the backend over a memory; None: the engine uses its own torch operations."""

    name: str
    open: Callable[[KvMemory], Backend | None]

    @property
    def copies_kv(self) -> bool:
        """True if each layer's KV is gathered before it is used."""
        return _BACKENDS[self.name].copies_kv


def choose_backend(
    name: str, model: Model, layout: KvLayout, layers: Mapping[int, LayerShape]
) -> ChosenBackend:
    """Raises ModelError."""
    shapes = group_shapes(layout, layers)
    wanted = Wanted(device=model.device, dtype=model.dtype, layout=layout, groups=shapes)
    chosen = choose(name, wanted)
    if chosen == TORCH:
        return ChosenBackend(chosen, lambda memory: None)
    places = layer_places(layout)
    return ChosenBackend(chosen, lambda memory: opener(chosen)(memory, shapes, places))


def opener(name: str) -> OpenBackend:
    listed = _BACKENDS[name]
    found: OpenBackend = getattr(import_module(listed.module), listed.kind)
    return found
