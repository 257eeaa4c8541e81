"""Draws tokens on a CPU by our kernel: the same bits as `engine.sampling.gumbel`, many times as
fast."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.native.kernel import SOURCE as ATTENTION
from engine.device.native_build import SOURCES, BuildError, Source, built, torch_fork
from engine.sampling.gumbel import GROUP, Draws

log = logging.getLogger(__name__)

SOURCE = Source(
    name="draw",
    main=SOURCES / "draw.cpp",
    parts=tuple(SOURCES / name for name in ("lanes.h", "team.h", "truncation.h")),
    compilers=ATTENTION.compilers,
    flags=(
        *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math"),
        *("-ffp-contract=off", "-fPIC", "-shared", "-w"),
    ),
)


@dataclass(frozen=True, slots=True)
class DrawKernel:
    _draw: Callable[..., None]
    _noise: Callable[..., None]
    _truncate: Callable[..., None]
    _mask: Callable[..., None]
    _fork: int

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Like `engine.sampling.gumbel.draw` of the ids that `truncation` leaves, on torch's
        threads."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.long)
        keys, temperatures = draws.keys, draws.temperatures
        assert keys.flags.c_contiguous and keys.shape == (rows, 4) and len(temperatures) == rows
        self._draw(
            self._fork, torch.get_num_threads(), rows, vocab, logits.data_ptr(),
            keys.ctypes.data, temperatures.ctypes.data, draws.cuts.ctypes.data, tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def mask(
        self, logits: torch.Tensor, sources: NDArray[np.int64], allowed: NDArray[np.int32]
    ) -> torch.Tensor:
        """A copy of `logits` fp32 `[rows, vocab]`, with -inf for ids without a bit in the row of
        `allowed` that `sources` names; -1: all are allowed. On torch's threads."""
        logits, allowed = logits.contiguous(), np.ascontiguousarray(allowed)
        found = torch.empty_like(logits)
        rows, vocab = logits.shape
        assert len(sources) == rows and 32 * allowed.shape[1] >= vocab
        self._mask(
            self._fork, torch.get_num_threads(), rows, vocab, logits.data_ptr(),
            sources.ctypes.data, allowed.ctypes.data, allowed.shape[1], found.data_ptr(),
        )  # fmt: skip
        return found

    def truncate(self, logits: torch.Tensor, draws: Draws, row: int) -> torch.Tensor:
        """Like `engine.sampling.truncation.truncate`, for one row `[vocab]`."""
        found = torch.empty_like(logits)
        temperature, cut = float(draws.temperatures[row]), draws.cuts[row].ctypes.data
        self._truncate(len(logits), logits.data_ptr(), temperature, cut, found.data_ptr())
        return found

    def noise(self, key: NDArray[np.uint32], vocab: int) -> torch.Tensor:
        """Like `engine.sampling.gumbel.noise`."""
        groups = -(-vocab // GROUP)
        found = torch.empty(groups * GROUP)
        self._noise(groups, key.ctypes.data, found.data_ptr())
        return found[:vocab]


def open_draw(path: Path) -> DrawKernel:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded ({error}): remove it") from error
    draw, noise = library.kvrelay_draw, library.kvrelay_noise
    truncate, mask = library.kvrelay_truncate, library.kvrelay_mask
    draw.argtypes = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 5]
    noise.argtypes = [c_int64, c_void_p, c_void_p]
    truncate.argtypes = [c_int64, c_void_p, c_float, c_void_p, c_void_p]
    mask.argtypes = [c_void_p, *[c_int64] * 3, *[c_void_p] * 3, c_int64, c_void_p]
    draw.restype = noise.restype = truncate.restype = mask.restype = None
    return DrawKernel(draw, noise, truncate, mask, torch_fork())


@cache
def host_draw() -> DrawKernel | None:
    """None, and one line in the log, if it can't be built."""
    try:
        return open_draw(built(SOURCE))
    except BuildError as error:
        log.warning("tokens are drawn in torch's operations, slower than by our kernel: %s", error)
        return None
