"""What a UCX library can do on this host: version, build, and transports per device.

`describe` asks in a process of its own, for a library may not load, or may clash with the one that
is loaded already: `python -m kvpool.transport.ucx_info LIBRARY` prints what it finds as JSON.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from kvpool.transport.ucx_options import UcxOptions

_NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
_FEATURES = 1 | 2  # UCP_FEATURE_TAG | UCP_FEATURE_RMA
_FIELD_FEATURES = 1
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxInfo:
    """`components` are what it was built with; `resources` are transport/device pairs that work
    here; `configured` its build flags, where the package tells."""

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
    """The UCX that ucxx loads: that of its wheel, or the system's where it is told to prefer it."""
    prefers_system = os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true"
    if prefers_system or not find_spec("libucx"):
        found = ctypes.util.find_library("ucp")
        return Path(found) if found else None
    return _first(_site("libucx") / "libucx" / "lib", "libucp.so*")


def describe(library: Path, options: UcxOptions) -> UcxInfo | str:
    """With these options; or why it can't be told."""
    command = [sys.executable, "-m", "kvpool.transport.ucx_info", str(library)]
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
    """The head of ucp_params_t; a mask of FEATURES makes UCX read no more."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("rest", ctypes.c_byte * 1024),
    )


def _ask(library: str) -> UcxInfo:
    """In the process of its own."""
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
    """What UCX prints of a context."""
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
    """What a C function writes to the file that it is given."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    write(file)  # type: ignore[operator]
    libc.fclose(file)
    return (text.value or b"").decode(errors="replace")


def _configured(library: Path) -> str:
    """From the ucx_info that lies beside the library, or is the system's."""
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
