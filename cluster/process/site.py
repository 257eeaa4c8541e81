"""What this machine offers to a cluster: CPUs, GPUs, an address."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from cluster.config.schema import Config
from cluster.core.resolve import Site


def local_site() -> Site:
    """The CPUs that this process may use; workers listen on loopback."""
    from engine.bundled import checkpoint_path

    cpus = len(os.sched_getaffinity(0))
    return Site(
        total_cpus=cpus, node_cpus=cpus, host="127.0.0.1", bundled_path=str(checkpoint_path())
    )


def site_with_gpus() -> Site:
    """Takes seconds on a machine with a GPU, because PyTorch is asked."""
    return replace(local_site(), gpus=local_gpus()[0])


def local_gpus() -> tuple[int, str]:
    """(number of GPUs that PyTorch can use here, reason if none)"""
    from kvpool.transport.gpu_files import NO_GPU, has_gpu_files

    if not has_gpu_files():
        return 0, NO_GPU
    from kvpool.transport.gpus import count_gpus

    found = count_gpus()
    return found.count, found.why_none


def located(config: Config) -> Config:
    """Gives a model folder and the file of API keys their full paths: Ray's processes have other
    working directories."""
    if config.router.api_keys is not None:
        keys = str(Path(config.router.api_keys).expanduser().resolve())
        router = config.router.model_copy(update={"api_keys": keys})
        config = config.model_copy(update={"router": router})
    path = config.model.path
    folder = None if path is None else Path(path).expanduser()
    if folder is None or not folder.is_dir():
        return config
    model = config.model.model_copy(update={"path": str(folder.resolve())})
    return config.model_copy(update={"model": model})
