"""Where each layer's KV lies. Pure."""

from __future__ import annotations

from kvpool.layout import KvLayout


def layer_places(layout: KvLayout) -> dict[int, tuple[int, int]]:
    """# layer |-> (layer group, index in it)"""
    return {
        layer: (g, i)
        for g, group in enumerate(layout.groups)
        for i, layer in enumerate(group.layers)
    }
