"""This host's RDMA devices, and the kind of memory access that UCX may use.

Read from /sys and the environment when asked; nothing is opened.

`describe` asks a UCX library for its version, build and transports per device. It runs in its own
process, because a library may fail to load, or clash with the one that is loaded already: `python
-m kvpool.transport.link_kind LIBRARY` prints the result as JSON.

CMA (process_vm_readv and _writev) moves bytes between processes of one host. Without it UCX uses
TCP.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvpool.transport.rdma.ucx_options import UcxOptions

_NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
_FEATURES = 1 | 2  # UCP_FEATURE_TAG | UCP_FEATURE_RMA
_FIELD_FEATURES = 1
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxInfo:
    """`components` are those that it was built with; `resources` are transport/device pairs that
    work here; `configured` are its build flags, if the package has them."""

    version: str
    components: tuple[str, ...]
    resources: tuple[str, ...]
    configured: str = ""


def nixl_package() -> str | None:
    """The module of the installed NIXL, or None."""
    return next((name for name in _NIXL_PACKAGES if find_spec(name)), None)


def library_of_nixl() -> Path | None:
    """The UCX that the NIXL wheel carries."""
    package = nixl_package()
    return _first(_site(package) / f"{package}.libs", "libucp*.so*") if package else None


def library_of_ucxx() -> Path | None:
    """The UCX that ucxx loads: that of its wheel, or the system's if it is told to prefer it."""
    prefers_system = os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true"
    if prefers_system or not find_spec("libucx"):
        found = ctypes.util.find_library("ucp")
        return Path(found) if found else None
    return _first(_site("libucx") / "libucx" / "lib", "libucp.so*")


@cache
def describe(library: Path, options: UcxOptions) -> UcxInfo | str:
    """The library's facts with these options, or the reason why there are none. Asked once in a
    process: it takes a second."""
    command = [sys.executable, "-m", "kvpool.transport.link_kind", str(library)]
    variables = {f"UCX_{name}": value for name, value in options.settings().items()}
    environment = {**os.environ, **variables, "UCX_LOG_LEVEL": "fatal"}
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S
        )
        found = json.loads(run.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return f"{library} can't be loaded or asked"
    lists = {name: tuple(found[name]) for name in ("components", "resources")}
    return UcxInfo(version=found["version"], configured=found["configured"], **lists)


def _site(package: str) -> Path:
    """The folder that holds the package."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(next(iter(spec.submodule_search_locations))).parent


def _first(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


class _Params(ctypes.Structure):
    """The head of ucp_params_t; with a mask of FEATURES UCX reads no more."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("rest", ctypes.c_byte * 1024),
    )


def _ask(library: str) -> UcxInfo:
    """Runs in the library's own process."""
    ucp = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    text = _context_text(ucp)
    return UcxInfo(
        version=ucp.ucp_get_version_string().decode(),
        components=tuple(re.findall(r"component +\d+ +: +(\S+)", text)),
        resources=tuple(re.findall(r"resource .* -- (\S+)", text)),
        configured=_configured(Path(library)),
    )


def _context_text(ucp: ctypes.CDLL) -> str:
    """UCX's text about a context."""
    major, minor, release = (ctypes.c_uint() for _ in range(3))
    ucp.ucp_get_version(*(ctypes.byref(part) for part in (major, minor, release)))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)):
        raise OSError("ucp_config_read failed")
    params = _Params(field_mask=_FIELD_FEATURES, features=_FEATURES)
    started = ucp.ucp_init_version(
        major, minor, ctypes.byref(params), config, ctypes.byref(context)
    )
    if started:
        raise OSError("ucp_init_version failed")
    return _printed(lambda file: ucp.ucp_context_print_info(context, file))


def _printed(write: object) -> str:
    """The text that a C function writes to a file."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    write(file)  # type: ignore[operator]
    libc.fclose(file)
    return (text.value or b"").decode(errors="replace")


def _configured(library: Path) -> str:
    """From the ucx_info beside the library, or the system's."""
    beside = library.resolve().parent.parent / "bin" / "ucx_info"
    command = str(beside) if beside.exists() else "ucx_info"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.resolve().parent)}
    if not beside.exists() and library.is_absolute():
        return ""
    try:
        run = subprocess.run([command, "-v"], env=environment, capture_output=True, text=True)
    except OSError:
        return ""
    found = re.search(r"Configured with: (.*)", run.stdout)
    return found.group(1) if found else ""


if __name__ == "__main__":
    print(json.dumps(asdict(_ask(sys.argv[1]))))


_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd", "gga")
"""Prefixes of UCX's names of RDMA transports."""

SYSFS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")


class LinkKind(StrEnum):
    """The kinds that `transfer.require` accepts. `tcp` can't be required: it is the fallback."""

    LOOPBACK = "loopback"
    SHM = "shm"
    CUDA_IPC = "cuda_ipc"
    RDMA = "rdma"
    GPUDIRECT = "gpudirect"  # RDMA from and to the memory of a GPU
    TCP = "tcp"

    def meets(self, required: Collection[str]) -> bool:
        """Whether a link of this kind may be used. What is required of RDMA, GPUDirect has."""
        also = (LinkKind.RDMA,) if self is LinkKind.GPUDIRECT else ()
        return not required or any(kind in required for kind in (self, *also))


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
    """In the order of their names; empty if the kernel has no RDMA."""
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
    """# GID index in use |-> RoCE version, and the traffic class."""
    found = [
        (f"gid {entry.name}", _read(entry)) for entry in sorted(path.glob("gid_attrs/types/*"))
    ]
    classes = sorted((path.parent.parent / "tc").glob(f"{path.name}/traffic_class"))
    found += [("traffic class", _read(entry)) for entry in classes]
    return [(name, value) for name, value in found if value]


def _read(path: Path) -> str:
    """Empty if the kernel has no value: unused GIDs are unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def no_rdma(
    sysfs: Path = SYSFS, devices: Path = DEVICES, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Why UCX can't use RDMA on this host, or None if it can."""
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


UCX_SCHEMES = ("nixl", "ucx")


def rdma_obstacle(scheme: str, ucx: UcxOptions) -> str | None:
    """Why nixl or ucx doesn't use RDMA here, or None."""
    info = _asked(scheme, ucx)
    return info if isinstance(info, str) else obstacle_of(info)


def cuda_obstacle(scheme: str, ucx: UcxOptions) -> str | None:
    """Why the UCX of nixl or ucx can't tell a CUDA device's memory from the host's, or None."""
    info = _asked(scheme, ucx)
    return info if isinstance(info, str) else no_cuda(info)


def _asked(scheme: str, ucx: UcxOptions) -> UcxInfo | str:
    library = library_of_nixl() if scheme == "nixl" else library_of_ucxx()
    return f"{scheme} is not installed" if library is None else describe(library, ucx)


def obstacle_of(info: UcxInfo) -> str | None:
    if any(name.startswith(_RDMA_TRANSPORTS) for name in info.resources):
        return None
    if "ib" not in info.components:
        return "its UCX was built without verbs"
    return no_rdma() or "UCX uses no RDMA device here"


def no_cuda(info: UcxInfo) -> str | None:
    """UCX knows the memory of CUDA devices by its transport cuda_copy."""
    if any(name.startswith("cuda_copy/") for name in info.resources):
        return None
    if not any(name.startswith("cuda") for name in info.components):
        return "its UCX was built without CUDA, or can't load its part for it"
    return "its UCX leaves out cuda_copy: UCX_TLS must name cuda"


PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_NAME = "cma"


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def obstacle(info: UcxInfo, tls: str | None, ptrace_scope: Path = PTRACE_SCOPE) -> str | None:
    """Why this UCX doesn't use CMA here; None if it does. `tls`: the value of UCX_TLS."""
    if any(name.partition("/")[0] == _NAME for name in info.resources):
        return None
    if _NAME not in info.components:
        return "its UCX was built without it"
    if (scope := _scope(ptrace_scope)) > 1:
        return f"kernel.yama.ptrace_scope is {scope}: set it to 0 or 1"
    if (refusal := try_write()) is not None:
        return (
            f"process_vm_writev fails: {refusal}; a container needs a seccomp profile that allows "
            "it, or the capability SYS_PTRACE"
        )
    return f"UCX_TLS={tls} leaves it out" if tls else "UCX found it unusable"


def _scope(path: Path) -> int:
    """0 if the kernel has no Yama."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def try_write() -> str | None:
    """Writes into this process's own memory. Returns why the system refuses even that."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    local, remote = (_Iovec(ctypes.addressof(memory), 1) for memory in (source, target))
    written = libc.process_vm_writev(
        os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0
    )
    return None if written == 1 else os.strerror(ctypes.get_errno())
