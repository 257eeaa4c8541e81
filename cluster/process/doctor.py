"""The findings of `kvrelay doctor`: each transport on this host, and the choice for a cluster file.

Each transport is tried for real: its endpoint is opened and registers memory.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cluster.config.schema import Config
from cluster.config.workers import WorkerPool
from cluster.core.plan import pool_node_settings, ucx_options
from cluster.core.resolve import resolve
from cluster.process.auto import settle_pool
from cluster.process.checks import problems
from cluster.process.site import local_site
from kvpool.transport import link_kind
from kvpool.transport.choice import BETWEEN_HOSTS, TRANSPORTS, Machine, choose_transports
from kvpool.transport.endpoints import PROBE_BYTES, EndpointOptions, obstacle
from kvpool.transport.gpus import GpuFacts, gpu_facts
from kvpool.transport.link_kind import LinkKind
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError
from kvrelay.types import Role

NEEDS = {
    "shm": "Linux; workers of one host, user and network namespace",
    "cuda_ipc": "NVIDIA GPUs with peer access; memory that can be shared (no expandable segments)",
    "nixl": "pip install 'kvrelay[nixl]'; for RDMA also: /dev/infiniband, memlock unlimited",
    "ucx": "pip install 'kvrelay[ucx]'; for RDMA also: a system UCX with verbs, /dev/infiniband, "
    "memlock unlimited",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One transport on this host. `kind` is the kind of its links; `why` is empty if it is
    usable."""

    transport: str
    usable: bool
    kind: LinkKind
    why: str
    needs: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """The transport of two pools; None where nothing connects them."""

    prefill: str
    decode: str
    same_host: str | None
    between_hosts: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`pool`: what a pool node of this host would take now. `snapshots`: whether CRIU can dump a
    process here. `problems`: why the cluster file can't run here; empty: it can."""

    findings: tuple[Finding, ...]
    choices: tuple[TransportChoice, ...]
    pool: str
    snapshots: str
    problems: tuple[str, ...]


def examine(config: Config) -> Diagnosis:
    """Takes a second or two."""
    gpus = gpu_facts()
    config = resolve(config, replace(local_site(), gpus=gpus.count))
    options = UcxOptions(**dict(ucx_options(config.transfer.ucx)))  # type: ignore[arg-type]
    findings = tuple(_finding(transport, options, gpus) for transport in TRANSPORTS)
    by_name = {finding.transport: finding for finding in findings}
    pool, too_little = _pool(config)
    return Diagnosis(
        findings=findings,
        choices=tuple(_choices(config, by_name)),
        pool=pool,
        snapshots=_snapshots(),
        problems=(
            *_link_problems(config, by_name),
            *too_little,
            *problems(config, gpus.count, gpus.why_none),
        ),
    )


# --- one transport ------------------------------------------------------------------------------


def _finding(transport: str, ucx: UcxOptions, gpus: GpuFacts) -> Finding:
    why = obstacle(transport, ucx, gpus=gpus.count)
    return Finding(
        transport=transport,
        usable=not why,
        kind=EndpointOptions(ucx=ucx, device=_device(gpus)).kind(transport),
        why=why,
        needs=NEEDS[transport],
        facts={name: text for name, text in _facts(transport, ucx, gpus).items() if text},
    )


def _facts(transport: str, ucx: UcxOptions, gpus: GpuFacts) -> dict[str, str]:
    match transport:
        case "shm":
            return {"memory": f"{_gib(psutil.virtual_memory().available)} available to memfd"}
        case "cuda_ipc":
            return _gpu_facts(gpus)
        case "nixl":
            return _ucx_facts(link_kind.library_of_nixl(), ucx) | _direct(transport, ucx, gpus)
        case _:
            return _ucx_facts(link_kind.library_of_ucxx(), ucx) | _direct(transport, ucx, gpus)


def _direct(transport: str, ucx: UcxOptions, gpus: GpuFacts) -> dict[str, str]:
    if not gpus.count:
        return {}
    why = EndpointOptions(ucx=ucx, device=_device(gpus)).no_gpudirect(transport)
    yes = f"yes, {PROBE_BYTES} bytes of it were registered"
    return {"GPU memory (GPUDirect)": f"no, by way of the host's: {why}" if why else yes}


def _device(gpus: GpuFacts) -> str:
    return "cuda" if gpus.count else "cpu"


def _gpu_facts(gpus: GpuFacts) -> dict[str, str]:
    pairs = ", ".join(f"{a}-{b}" for a, b in gpus.without_peer_access)
    access = f"all but {pairs}" if pairs else "between all"
    shareable = "expandable segments are on, so no" if gpus.expandable_segments else "yes"
    return {
        "devices": ", ".join(f"{i}: {name}" for i, name in enumerate(gpus.names)),
        "peer access": access if gpus.count > 1 else "",
        "shareable memory": shareable if gpus.count else "",
    }


def _ucx_facts(library: Path | None, ucx: UcxOptions) -> dict[str, str]:
    if library is None:
        return {}
    info = link_kind.describe(library, ucx)
    if isinstance(info, str):
        return {"UCX": info}
    obstacle = link_kind.obstacle_of(info)
    no_cma = link_kind.obstacle(info, ucx.tls or os.environ.get("UCX_TLS"))
    return {
        "UCX": f"{info.version}, built with {', '.join(info.components)}",
        "build flags": info.configured,
        "transports": ", ".join(info.resources),
        "RDMA": f"no: {obstacle}" if obstacle else "yes",
        "CMA (process_vm_writev) within a host": f"no, TCP instead: {no_cma}" if no_cma else "yes",
        "memlock limit": _memlock(),
        "/dev/shm": _shm_size(),
        **_port_facts(),
    }


def _port_facts() -> dict[str, str]:
    told = {}
    for port in link_kind.rdma_ports():
        roce = "".join(f", {name} {value}" for name, value in port.roce)
        told[f"{port.device}:{port.port}"] = f"{port.state}, {port.layer}, {port.rate}{roce}"
    return told


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{_gib(soft)}, RDMA wants unlimited"


def _shm_size() -> str:
    try:
        return f"{_gib(shutil.disk_usage('/dev/shm').free)} free"
    except OSError:
        return "absent: UCX falls back to slower copies within a host"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**27 else f"{count / 2**10:.0f} KiB"


# --- CRIU ---------------------------------------------------------------------------------------

CRIU_S = 20.0
_ASLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
_SYMPTOM = re.compile(r"exited, status=\d+$")
"""Of a probe of CRIU's own; the errors behind it say more."""


def _snapshots() -> str:
    """A process that does nothing is dumped. Its exact errors where that fails."""
    criu = shutil.which("criu", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if criu is None:
        return "no: criu is not installed"
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        _ASLEEP, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    ) as asleep:
        try:
            why = _dump(criu, asleep.pid)
        finally:
            asleep.kill()
    return f"no: {why}" if why else "yes"


def _dump(criu: str, pid: int) -> str:
    """Why it fails; empty: it does not."""
    with tempfile.TemporaryDirectory() as images:
        command = [criu, "dump", "--tree", str(pid), "--images-dir", images, "--leave-running"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CRIU_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines()]
    errors = [line for line in lines if "Error" in line and not _SYMPTOM.search(line)]
    return "; ".join(errors or lines[-1:]) or f"criu dump ended with {done.returncode}"


# --- a cluster file -----------------------------------------------------------------------------


def _choices(config: Config, findings: Mapping[str, Finding]) -> list[TransportChoice]:
    """`config` must be resolved."""
    pools = enumerate(config.workers)
    named = [(f"workers.{i} ({pool.role or 'auto'})", pool) for i, pool in pools]
    return [
        _choice(config, findings, (source, one), (target, other))
        for source, one in named
        if one.role in (Role.PREFILL, None)
        for target, other in named
        if other.role is not Role.PREFILL
    ]


def _choice(
    config: Config,
    findings: Mapping[str, Finding],
    source: tuple[str, WorkerPool],
    target: tuple[str, WorkerPool],
) -> TransportChoice:
    on_gpus = source[1].on_gpu and target[1].on_gpu
    wanted = config.transfer.transports or _chosen(config, findings, on_gpus)
    usable = [name for name in wanted if _allowed(config, findings[name])]
    near = [name for name in usable if name != "cuda_ipc" or on_gpus]
    far = [name for name in usable if name in BETWEEN_HOSTS]
    return TransportChoice(
        prefill=source[0],
        decode=target[0],
        same_host=next(iter(near), None),
        between_hosts=next(iter(far), None),
    )


def _chosen(config: Config, findings: Mapping[str, Finding], on_gpus: bool) -> tuple[str, ...]:
    """The result of `auto` in a cluster of several hosts."""
    machine = Machine(
        obstacle=lambda name: findings[name].why, kind=lambda name: findings[name].kind
    )
    require = config.transfer.require
    chosen = choose_transports(machine, on_gpu=on_gpus, spans_hosts=True, require=require)
    return chosen.transports


def _allowed(config: Config, finding: Finding) -> bool:
    return finding.usable and finding.kind.meets(config.transfer.require)


def _link_problems(config: Config, findings: Mapping[str, Finding]) -> list[str]:
    wanted = [findings[name] for name in config.transfer.transports or TRANSPORTS]
    if any(_allowed(config, finding) for finding in wanted):
        return []
    reasons = "; ".join(f"{f.transport}: {_refusal(config, f)}" for f in wanted)
    return [f"transfer.transports: none can be used here: {reasons}"]


def _refusal(config: Config, finding: Finding) -> str:
    if not finding.usable:
        return finding.why
    kinds = ", ".join(config.transfer.require)
    text = f"it is {finding.kind} and transfer.require is [{kinds}]"
    options = UcxOptions(**dict(ucx_options(config.transfer.ucx)))  # type: ignore[arg-type]
    here = EndpointOptions(ucx=options, device=_device(gpu_facts()))
    why = here.lacks(config.transfer.require, finding.transport)
    return f"{text} ({why})" if why else text


def _pool(config: Config) -> tuple[str, list[str]]:
    """(the choice for a pool node of this host, problems). With `auto` it is no problem if there is
    none."""
    if config.pool.enabled == "off":
        return "off", []
    try:
        return settle_pool(pool_node_settings(config))[1], []
    except ConfigError as error:
        return f"none: {error}", [str(error)] if config.pool.enabled == "on" else []
