"""Records an engine's decode steps as CUDA graphs, where its backend and its model allow it."""

from __future__ import annotations

import logging

import torch

from engine.runner import Engine

log = logging.getLogger(__name__)


def record_decode(engine: Engine, most: int) -> None:
    """Steps of up to `most` sequences are replayed from now on. What can't be recorded is said in
    the log and runs as before."""
    if engine.model.device.type != "cuda":
        return
    reason = _unfit(engine)
    if reason is None:
        reason = _record(engine, most)
    if reason is not None:
        log.warning("engine.cuda_graphs: decode steps are not recorded: %s", reason)


def _unfit(engine: Engine) -> str | None:
    if engine.model.longrope is not None:
        return "the model treats short and long sequences differently"
    if engine.model.group is not None:
        return "parallel.tensor: NCCL's sums would have to be recorded on all ranks alike"
    from engine.backends.triton import TritonBackend

    if not isinstance(engine.backend, TritonBackend):
        return "only attention.backend triton reads its work from fixed memory"
    return None


def _record(engine: Engine, most: int) -> str | None:
    from engine.backends.graphs import CudaRecorder, DecodeGraphs
    from engine.backends.static_decode import StaticDecode
    from engine.backends.triton import TritonBackend

    assert isinstance(engine.backend, TritonBackend)
    inputs = StaticDecode(engine.backend, most, engine.facts.max_model_len)
    try:
        engine.graphs = DecodeGraphs(engine.model, inputs, most, CudaRecorder(engine.model.device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize(engine.model.device)
        return " ".join(str(error).split())[:300]
    return None
