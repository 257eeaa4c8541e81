"""Other processes for tests, forked from one that has already imported what takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "cluster.cli.plain.run",
    "cluster.pool_node.node",
    "cluster.worker.process",
    "cluster.config.load",
    "engine.family.share",
    "engine.follower",
    "transformers.models.llama.modeling_llama",
    "kvpool.transport.registry",
    "pydantic",
]


def forks() -> ForkServerContext:
    """Its server starts with the first process, with the environment and arguments of then, and has
    one thread: OMP_NUM_THREADS must be 1."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def start_server() -> None:
    """Else the first process does."""
    forks()
    forkserver.ensure_running()
