"""Chooses the attention backend: the configured one, or with "auto" the fastest that works here.

A backend that can't serve the model on its device is refused when the worker starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch

from engine.attention.backend import Backend, GroupShape
from engine.attention.choosing.needs import NEEDS, Wanted
from engine.model.kv_layout import LayerShape, layer_places
from engine.model.model import Model
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.errors import ModelError

log = logging.getLogger(__name__)

Places = Mapping[int, tuple[int, int]]
OpenBackend = Callable[[KvMemory, tuple[GroupShape, ...], Places], Backend]

TORCH = "sdpa"


class _Listed(NamedTuple):
    """The module is imported when it is used. `copies_kv`: each layer's KV is gathered before use.
    `measured`: "auto" may choose it on CUDA."""

    module: str
    kind: str
    copies_kv: bool = False
    measured: bool = False


_BACKENDS = {
    "native": _Listed("engine.attention.native.backend", "NativeBackend"),
    "triton": _Listed("engine.attention.triton.backend", "TritonBackend", measured=True),
    "flashinfer": _Listed("engine.attention.cuda.flashinfer", "FlashInferBackend", measured=True),
    "flash": _Listed("engine.attention.cuda.flash", "FlashBackend", measured=True),
    "flex": _Listed("engine.attention.flex", "FlexBackend", copies_kv=True),
    TORCH: _Listed("engine.attention.torch_paged", "SdpaBackend", copies_kv=True, measured=True),
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
    """`name` is a key of the table above, or "auto". Raises ModelError that names the YAML key."""
    if name != "auto":
        reason = NEEDS[name](wanted)
        if reason is not None:
            raise ModelError(f"attention.backend: {name} can't be used: {reason}, or use auto")
        return name
    if not wanted.on_cuda:
        return "native" if NEEDS["native"](wanted) is None else choose(TORCH, wanted)
    names = usable(wanted)
    return names[0] if len(names) == 1 else _fastest(names, wanted)


def usable(wanted: Wanted) -> list[str]:
    """The backends that "auto" chooses from."""
    return [name for name, one in _BACKENDS.items() if one.measured and not NEEDS[name](wanted)]


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


def _fastest(names: list[str], wanted: Wanted) -> str:
    from engine.attention.choosing.measure import measure

    times = {name: measure(opener(name), wanted) for name in names}
    torch.cuda.empty_cache()  # free memory is measured next
    best = {
        work: min(found[work] for found in times.values()) for work in next(iter(times.values()))
    }

    def slowness(name: str) -> float:
        """Its time relative to the fastest backend, multiplied over the kinds of work."""
        product = 1.0
        for work, seconds in times[name].items():
            product *= seconds / best[work]
        return product

    chosen = min(names, key=slowness)
    for name, found in times.items():
        shown = ", ".join(f"{work} {1e6 * seconds:.0f} us" for work, seconds in found.items())
        log.info("attention.backend: auto: %s: %s", name, shown)
    log.info("attention.backend: auto: %s is used", chosen)
    return chosen
