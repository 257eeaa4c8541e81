"""CMA (process_vm_readv and _writev): how UCX moves bytes between processes of one host, and what
keeps it from that. Without it UCX takes TCP.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvpool.transport.ucx_info import UcxInfo

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_NAME = "cma"


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def obstacle(info: UcxInfo, tls: str | None, ptrace_scope: Path = PTRACE_SCOPE) -> str | None:
    """Why this UCX doesn't use it here; None where it does. `tls`: as UCX_TLS says."""
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
    """0 where the kernel has no Yama."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def try_write() -> str | None:
    """Into memory of this very process: why the system refuses even that."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    local, remote = (_Iovec(ctypes.addressof(memory), 1) for memory in (source, target))
    written = libc.process_vm_writev(
        os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0
    )
    return None if written == 1 else os.strerror(ctypes.get_errno())
