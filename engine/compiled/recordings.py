"""Keeps recordings of captured graphs in the user's cache folder, by what decides their content."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from pathlib import Path

import torch
import transformers
from torch.fx import GraphModule

from engine import attention
from engine.compiled import capture as capturing
from engine.compiled import recording
from engine.compiled.capture import capture
from engine.compiled.folder import cache_folder, write_whole
from engine.compiled.graph import Captured
from engine.compiled.recording import NotRecorded, record, replay
from engine.compiled.rotaries import whole_rotaries
from engine.model import Model

log = logging.getLogger(__name__)


def recorded(model: Model) -> Captured:
    """From its recording, else captured and recorded. Raises NotCaptured."""
    path = cache_folder() / f"graph-{_key(model)}.json"
    try:
        return replay(path.read_text(), model.module)
    except FileNotFoundError:
        pass
    except (OSError, NotRecorded) as error:
        log.info("compile: %s is made anew: %s", path, error)
    return _record(model, path)


def _record(model: Model, path: Path) -> Captured:
    started_s = time.monotonic()
    try:
        made = _captured(model)
        text = record(made, model.module)
    except NotRecorded as error:
        raise capturing.NotCaptured(str(error)) from error
    try:
        write_whole(path, text)
        log.info("compile: captured in %.1f s, once: %s", time.monotonic() - started_s, path)
    except OSError as error:
        log.warning("compile: the next start takes as long: %s", error)
    del made
    gc.collect()  # it is held in circles, and the weights with it
    return replay(text, model.module)


def _captured(model: Model) -> GraphModule:
    if model.longrope is None:
        return capture(model.whole)
    with whole_rotaries(model.module, model.dtype):
        return capture(model.whole)


def _key(model: Model) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key[0] != "_"}
    sources = [Path(str(part.__file__)).read_text() for part in (attention, capturing, recording)]
    versions = (torch.__version__, transformers.__version__, model.dtype_name)
    shapes = [(name, *part.shape) for name, part in model.module.named_parameters()]
    text = json.dumps([config, versions, sources, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
