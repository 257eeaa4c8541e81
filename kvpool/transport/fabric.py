"""What this host offers to links: RDMA devices and the kind of memory access that UCX may use.

Read from /sys and the environment when asked; nothing is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvpool.transport import ucx_info
from kvpool.transport.ucx_info import UcxInfo
from kvpool.transport.ucx_options import UcxOptions

_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd", "gga")
"""How UCX's names of RDMA transports begin."""

SYSFS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")


class LinkKind(StrEnum):
    """What `transfer.require` may ask for; `tcp` can't be asked for, it is what is left."""

    LOOPBACK = "loopback"
    SHM = "shm"
    CUDA_IPC = "cuda_ipc"
    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of one device. `layer` is InfiniBand or Ethernet (RoCE); `roce` its settings."""

    device: str
    port: int
    state: str
    layer: str
    rate: str
    roce: tuple[tuple[str, str], ...] = ()

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


def rdma_ports(sysfs: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """In the order of their names; none where the kernel has no RDMA."""
    return tuple(_port(path) for path in sorted(sysfs.glob("*/ports/*")))


def _port(path: Path) -> RdmaPort:
    return RdmaPort(
        device=path.parent.parent.name,
        port=int(path.name),
        state=_read(path / "state").rpartition(" ")[2],
        layer=_read(path / "link_layer"),
        rate=_read(path / "rate"),
        roce=tuple(_roce(path)),
    )


def _roce(path: Path) -> list[tuple[str, str]]:
    """GID index |-> RoCE version, of those in use, and the traffic class."""
    found = [
        (f"gid {entry.name}", _read(entry)) for entry in sorted(path.glob("gid_attrs/types/*"))
    ]
    classes = sorted((path.parent.parent / "tc").glob(f"{path.name}/traffic_class"))
    found += [("traffic class", _read(entry)) for entry in classes]
    return [(name, value) for name, value in found if value]


def _read(path: Path) -> str:
    """Empty for what the kernel doesn't tell: unused GIDs are unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def no_rdma(
    sysfs: Path = SYSFS, devices: Path = DEVICES, environment: Mapping[str, str] = os.environ
) -> str | None:
    """What on this host keeps UCX from RDMA, or None when nothing does."""
    ports = rdma_ports(sysfs)
    if not ports:
        return f"this host has no RDMA device ({sysfs} is empty or absent)"
    active = {port.device for port in ports if port.active}
    if not active:
        states = ", ".join(f"{port.device}:{port.port} is {port.state}" for port in ports)
        return f"no RDMA port is active: {states}"
    verbs = [path for path in devices.glob("uverbs*") if os.access(path, os.R_OK | os.W_OK)]
    if not verbs:
        return f"{devices}/uverbs* can't be opened; a container needs the device mounted"
    return _excluded(active, environment)


def _excluded(active: set[str], environment: Mapping[str, str]) -> str | None:
    tls = environment.get("UCX_TLS", "all")
    named = {name.strip().partition(":")[0] for name in tls.lstrip("^").split(",")}
    rdma = {"all", "ib", "rc", "rc_v", "rc_x", "rc_mlx5", "rc_verbs", "dc", "dc_x", "ud", "srd"}
    if bool(named & rdma) == tls.startswith("^"):
        return f"UCX_TLS={tls} leaves out RDMA"
    devices = environment.get("UCX_NET_DEVICES", "all")
    if devices != "all" and not any(name in devices for name in active):
        return f"UCX_NET_DEVICES={devices} names none of {', '.join(sorted(active))}"
    return None


def link_kind(scheme: str, ucx: UcxOptions) -> LinkKind:
    """What a link of this transport is here, between hosts if it can be."""
    if scheme in ("nixl", "ucx"):
        return LinkKind.TCP if rdma_obstacle(scheme, ucx) else LinkKind.RDMA
    return LinkKind(scheme)


def rdma_obstacle(scheme: str, ucx: UcxOptions) -> str | None:
    """Why nixl or ucx doesn't use RDMA here, or None: its UCX is asked, in another process."""
    library = ucx_info.library_of_nixl() if scheme == "nixl" else ucx_info.library_of_ucxx()
    if library is None:
        return f"{scheme} is not installed"
    info = ucx_info.describe(library, ucx)
    return info if isinstance(info, str) else obstacle_of(info)


def obstacle_of(info: UcxInfo) -> str | None:
    if any(name.startswith(_RDMA_TRANSPORTS) for name in info.resources):
        return None
    if "ib" not in info.components:
        return "its UCX was built without verbs"
    return no_rdma() or "UCX uses no RDMA device here"
