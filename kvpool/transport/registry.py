"""Transports by scheme. A transport joins with one line in `_OPENERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpool.transport.gpus import gpu_name
from kvpool.transport.loopback import LoopbackEndpoint
from kvpool.transport.mapped.cuda_ipc import CudaIpcExposure
from kvpool.transport.mapped.shm import ShmExposure
from kvpool.transport.peer.base import SEND_TIMEOUT_S, Callbacks, Endpoint
from kvpool.transport.peer.endpoint import PeerEndpoint
from kvpool.transport.peer.exposure import Exposure
from kvpool.transport.peer.rendezvous import ON_DEVICE, Network, Rendezvous, SameHost
from kvpool.transport.rdma.agent import Agent
from kvpool.transport.rdma.nixl import NixlAgent
from kvpool.transport.rdma.one_sided import OneSidedExposure
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from kvpool.transport.rdma.ucx import UcxAgent
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation

LOOPBACK_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    incarnation: Incarnation
    callbacks: Callbacks
    send_timeout_s: float
    host: str
    port_range: tuple[int, int] | None
    secret: bytes
    ucx: UcxOptions
    slabs: SlabMemory
    device: str
    name: str | None


def _loopback(options: _Options) -> Endpoint:
    return LoopbackEndpoint(options.incarnation, options.callbacks, options.send_timeout_s)


def _shm(options: _Options) -> Endpoint:
    return _endpoint(options, ShmExposure(), SameHost("shm", options.name or options.incarnation))


def _nixl(options: _Options) -> Endpoint:
    options.slabs.check()
    return _one_sided(options, "nixl", NixlAgent(options.incarnation, options.ucx))


def _ucx(options: _Options) -> Endpoint:
    options.slabs.check()
    return _one_sided(options, "ucx", UcxAgent(options.ucx, options.slabs))


def _cuda_ipc(options: _Options) -> Endpoint:
    exposure = CudaIpcExposure(options.device)
    name = f"{gpu_name(exposure.device)}/{options.incarnation}"
    return _endpoint(options, exposure, SameHost("cuda_ipc", name))


_OPENERS: dict[str, Callable[[_Options], Endpoint]] = {
    "loopback": _loopback,
    "shm": _shm,
    "nixl": _nixl,
    "ucx": _ucx,
    "cuda_ipc": _cuda_ipc,
}


def schemes() -> tuple[str, ...]:
    return tuple(_OPENERS)


def open_endpoint(
    scheme: str,
    incarnation: Incarnation,
    callbacks: Callbacks,
    *,
    send_timeout_s: float = SEND_TIMEOUT_S,
    host: str = LOOPBACK_HOST,
    port_range: tuple[int, int] | None = None,
    secret: bytes = b"",
    ucx: UcxOptions | None = None,
    slabs: SlabMemory | None = None,
    device: str = "cuda",
    name: str | None = None,
) -> Endpoint:
    """`host` is where links between hosts listen, and what peers are told; on a port from
    `port_range` (both ends included), else on any. Such links take only peers with the same
    `secret`; without one, none. `ucx` and `slabs` are for the links whose bytes UCX moves,
    `device` (PyTorch's name) for those between devices. With `name`, `shm` listens at `shm:NAME`,
    where peers of this host find it without being told.

    Raises ConfigError for a scheme that does not exist, naming those that do, for a package that is
    not installed, for options that UCX refuses, for a device that
    is not there, and when no port is free.
    """
    opener = _OPENERS.get(scheme)
    if opener is None:
        raise ConfigError(f"no transport {scheme!r}; there are: {', '.join(schemes())}")
    return opener(
        _Options(
            incarnation=incarnation,
            callbacks=callbacks,
            send_timeout_s=send_timeout_s,
            host=host,
            port_range=port_range,
            secret=secret,
            ucx=replace(ucx or UcxOptions(), port_range=port_range),
            slabs=slabs or SlabMemory(),
            device=device,
            name=name,
        )
    )


def _one_sided(options: _Options, scheme: str, agent: Agent) -> Endpoint:
    """Peers see by the address whether its slabs lie on a device."""
    exposure = OneSidedExposure(agent, options.slabs)
    on_device = options.slabs.place is SlabPlace.DEVICE
    try:
        network = Network(
            scheme,
            f"{ON_DEVICE}/{options.incarnation}" if on_device else options.incarnation,
            host=options.host,
            port_range=options.port_range,
            secret=options.secret,
        )
    except ConfigError:
        exposure.close()
        raise
    return _endpoint(options, exposure, network)


def _endpoint(options: _Options, exposure: Exposure, rendezvous: Rendezvous) -> Endpoint:
    return PeerEndpoint(
        options.incarnation, options.callbacks, options.send_timeout_s, rendezvous, exposure
    )
