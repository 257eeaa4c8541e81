"""What settings leave to their machine: the device and the transports of a worker, the memory of a
pool node."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from cluster.config.types import format_size
from cluster.core.settings import PoolNodeSettings, WorkerSettings
from engine.device.host_memory import available_bytes
from kvpool.transport.choice import ChosenTransports, Machine, choose_transports, spans_hosts
from kvpool.transport.endpoints import EndpointOptions, obstacle
from kvpool.transport.gpus import GpuCount, count_gpus
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError, ModelError

SHARE_OF_POOL = 4
"""A pool node takes at most one part in four of the memory that is available at its start."""
MOST_POOL_BYTES = 64 * 2**30
LEAST_POOL_BYTES = 256 * 2**20
"""A pool of less is not worth a process: in bf16 these are 2,048 tokens of Llama-3.1-8B's KV."""
PAGES_BYTES = 2 * 2**20


def settle(settings: WorkerSettings) -> tuple[WorkerSettings, str]:
    """(settings without "auto" for device and transports, the choice and its reason). Opens each
    transport once. Raises ModelError or ConfigError when nothing fits."""
    gpus = count_gpus()
    device, because = choose_device(
        settings.device, settings.gpus, gpus, settings.tensor * settings.pipeline
    )
    text = f"device {device}" + (f" ({because})" if because else "")
    if settings.transports:
        return replace(settings, device=device), f"{text}, KV over {_listed(settings.transports)}"
    found = _machine(dict(settings.ucx), device, gpus)
    chosen = choose_transports(
        found,
        on_gpu=device != "cpu",
        spans_hosts=spans_hosts(settings.host),
        require=settings.require,
    )
    if not chosen.transports:
        raise ConfigError(f"no transport can be used: {chosen.why}")
    settled = replace(settings, device=device, transports=chosen.transports)
    return settled, f"{text}, KV over {_told(chosen, device)}"


def choose_device(
    device: str, set_aside: float | None, gpus: GpuCount, ranks: int = 1
) -> tuple[str, str]:
    """(device, why). `set_aside`: GPUs that Ray reserved for this worker, or None without Ray. Each
    of its `ranks` needs one. Raises ModelError for a reserved GPU that PyTorch can't use."""
    if device != "auto":
        return device, ""
    if set_aside is None and 0 < gpus.count < ranks:
        return "cpu", f"this machine has fewer GPUs, {gpus.count}, than the {ranks} ranks need"
    if set_aside is None:
        return ("cuda", "this machine has a GPU") if gpus.count else ("cpu", gpus.why_none)
    if not set_aside:
        none_free = "no GPU is set aside for it: there are none, or fewer than its ranks"
        return "cpu", gpus.why_none or none_free
    if not gpus.count:
        raise ModelError(
            f"Ray has set a GPU aside for this worker, but {gpus.why_none}: set device: cpu, or "
            "mend the GPU"
        )
    part = f"{set_aside:g} of a GPU is" if set_aside < 1 else "a GPU is"
    return "cuda", f"{part} set aside for it"


def settle_pool(settings: PoolNodeSettings) -> tuple[PoolNodeSettings, str]:
    """(settings with a size, the choice and its reason). Raises ConfigError where the host has no
    memory to spare."""
    if settings.host_bytes is not None:
        return settings, f"{format_size(settings.host_bytes)} of host memory"
    nbytes, why = pool_memory(available_bytes())
    if nbytes is None:
        raise ConfigError(f"no memory to spare: {why}")
    return replace(settings, host_bytes=nbytes), f"{_gib(nbytes)} of host memory ({why})"


def pool_memory(available: int) -> tuple[int | None, str]:
    """(the size of a pool node's host tier where `available` bytes are left, the reason). None:
    too little is left for one."""
    part = available // SHARE_OF_POOL
    share = f"a quarter of the {_gib(available)} available"
    if part < LEAST_POOL_BYTES:
        return None, f"{share} is less than {format_size(LEAST_POOL_BYTES)}"
    if part > MOST_POOL_BYTES:
        return MOST_POOL_BYTES, f"at most this, of {_gib(available)} available"
    return part // PAGES_BYTES * PAGES_BYTES, share


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def far_transports(settings: PoolNodeSettings) -> tuple[str, ...]:
    """The transports of a pool node for workers of other hosts."""
    if settings.transports is not None:
        return settings.transports
    found = _machine(dict(settings.ucx), "cpu", GpuCount(count=0))
    far = spans_hosts(settings.host)
    chosen = choose_transports(found, on_gpu=False, spans_hosts=far)
    return tuple(one for one in chosen.transports if one != "shm")


def _machine(ucx: dict[str, str | int], device: str, gpus: GpuCount) -> Machine:
    options = UcxOptions(**ucx)  # type: ignore[arg-type]
    return Machine(
        obstacle=cache(partial(obstacle, ucx=options, gpus=gpus.count, device=device)),
        kind=EndpointOptions(ucx=options, device=device).kind,
    )


def _told(chosen: ChosenTransports, device: str) -> str:
    """Skips reasons that nobody asks for: on a CPU, why there is no link between GPUs."""
    others = tuple(one for one in chosen.left_out if one[0] != "cuda_ipc" or device != "cpu")
    why = replace(chosen, left_out=others).why
    return _listed(chosen.transports) + (f" (not {why})" if why else "")


def _listed(transports: tuple[str, ...]) -> str:
    return ", ".join(transports)
