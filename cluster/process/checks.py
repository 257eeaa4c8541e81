"""Checks before the start of a cluster, on the machine that will run all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from cluster.config.router import PORT_KINDS, RouterSection
from cluster.config.schema import Config, ModelSection
from cluster.core.plan import internal_host, plan_cluster, shortage
from cluster.core.resolve import resolve
from cluster.core.settings import NODE_HOST
from cluster.process.site import local_gpus, site_with_gpus
from engine.model.checkpoint import check_model
from kvrelay.errors import ConfigError, ModelError
from router.live.listener import listen


def check_here(config: Config) -> None:
    """Raises ConfigError that names all problems."""
    gpus, why_none = local_gpus()
    found = problems(resolve(config, site_with_gpus()), gpus, why_none)
    if found:
        raise ConfigError("; ".join(found))


def problems(config: Config, gpus: int, why_none: str) -> list[str]:
    """Why a resolved cluster can't start here, with `gpus` that PyTorch can use, or `why_none`."""
    return [
        *_busy_ports(config.router),
        *_model_problems(config.model),
        *_device_problems(config, gpus, why_none),
    ]


def _busy_ports(router: RouterSection) -> Iterator[str]:
    for number in range(router.replicas):
        for key, port in asdict(router.ports(number)).items():
            try:
                listen(PORT_KINDS[key], _host(router, key), port).close()
            except ConfigError as error:
                yield str(error)


def _host(router: RouterSection, key: str) -> str:
    if not key.startswith("internal_"):
        return router.host
    host = internal_host(router)  # a node knows its own address only when it starts
    return "0.0.0.0" if host == NODE_HOST else host


def _model_problems(model: ModelSection) -> Iterator[str]:
    assert model.path is not None, "resolved"
    try:
        check_model(model.path, model.revision)
    except ModelError as error:
        yield str(error)


def _device_problems(config: Config, gpus: int, why_none: str) -> list[str]:
    has = why_none or f"this machine has {gpus} GPUs"
    absent = [
        f"workers.{index}.device: {pool.device}, and {has}"
        for index, pool in enumerate(config.workers)
        if ":" in pool.device and int(pool.device.partition(":")[2]) >= gpus
    ]
    if absent:
        return absent
    missing = shortage(plan_cluster(config), {"GPU": gpus}, only=("GPU",))
    return [f"{missing} ({why_none})" if why_none else missing] if missing else []
