"""Which transports can be used on this host: each is tried for real, with memory registered."""

from __future__ import annotations

import contextlib
from uuid import uuid4

from kvpool.transport.base import Callbacks
from kvpool.transport.registry import open_endpoint
from kvpool.transport.ucx_options import UcxOptions
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation

PROBE_BYTES = 4096


def obstacle(transport: str, ucx: UcxOptions, *, gpus: int, device: str = "cuda") -> str:
    """Why it can't be used here; empty when it can. `gpus`: how many this process can use."""
    if transport == "cuda_ipc" and not gpus:
        return "no CUDA device"
    nothing = Callbacks(
        on_connect=lambda _: None, on_message=lambda *_: None, on_lost=lambda _: None
    )
    name = Incarnation(f"probe-{uuid4().hex}")
    try:
        endpoint = open_endpoint(transport, name, nothing, ucx=ucx, device=device)
    except (ConfigError, OSError, RuntimeError) as error:
        return str(error)
    with contextlib.closing(endpoint):
        try:
            endpoint.register(PROBE_BYTES)
        except (ConfigError, OSError, RuntimeError) as error:
            return f"memory can't be registered: {error}"
    return ""
