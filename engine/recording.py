"""Whether an engine's decode steps can be recorded as CUDA graphs, and recording them."""

from __future__ import annotations

import logging

import torch

from engine.runner import Engine
from kvrelay.errors import ModelError

log = logging.getLogger(__name__)


def record_decode(engine: Engine, most: int) -> None:
    """From now on steps of up to `most` sequences are replayed. If they can't be recorded, the log
    says why, and they run as before. Raises ModelError if one of several ranks can't: it would go
    on without, and the others wait for its sums for ever."""
    if engine.model.device.type != "cuda":
        return
    reason = _unfit(engine) or _try_record(engine, most)
    if reason is not None:
        log.warning("engine.cuda_graphs: decode steps are not recorded: %s", reason)


def rehearse_recording(engine: Engine, most: int) -> Engine:
    """Records, if that can be done, for as long as the engine is kept, and says nothing: what the
    graphs take can be measured before the rest of the memory is filled with KV."""
    if engine.model.device.type == "cuda" and _unfit(engine) is None:
        _try_record(engine, most)
    return engine


def _unfit(engine: Engine) -> str | None:
    """Why its steps can't be recorded. All ranks ask at the same time."""
    reason, group = unfit(engine), engine.model.group
    if group is None or not group.can_record:
        return reason
    fit = int(group.sum(torch.tensor([float(reason is None)])))
    if fit not in (0, group.size):
        told = reason or "another rank says why in its log"
        raise ModelError(
            f"{fit} of {group.size} ranks can record their decode steps, so all would wait for "
            f"ever ({told}): set engine.cuda_graphs to off"
        )
    return reason


def unfit(engine: Engine) -> str | None:
    if engine.model.longrope is not None:
        return "the model treats short and long sequences differently"
    if engine.stages > 1:
        return "stages of a pipeline hand over hidden states in between"
    if engine.model.group is not None and not engine.model.group.can_record:
        return "the sums of ranks go through the host"
    from engine.attention.triton.backend import TritonBackend

    if not isinstance(engine.backend, TritonBackend):
        return "only attention.backend triton reads its work from fixed memory"
    return None


def _try_record(engine: Engine, most: int) -> str | None:
    """Why not; None: it is done."""
    reason = _record(engine, most)
    if reason is not None and engine.model.group is not None:
        raise ModelError(
            f"a rank can't record its decode steps ({reason}): set engine.cuda_graphs to off"
        )
    return reason


def _record(engine: Engine, most: int) -> str | None:
    from engine.attention.cuda.graphs import CudaRecorder, DecodeGraphs, StaticDecode
    from engine.attention.triton.backend import TritonBackend

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
