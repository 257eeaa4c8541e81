"""Non-negative least squares, of relative errors. Pure.

Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TOLERANCE = 1e-10


def relative_least_squares(rows: Floats, seconds: Floats) -> Floats:
    """The x >= 0 that makes `rows @ x / seconds` nearest to ones. `rows` `[samples, columns]`,
    `seconds` positive; a column of zeros gets 0."""
    relative = rows / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    found: Floats = _nnls(relative / scale, np.ones(len(seconds))) / scale
    return found


def _nnls(matrix: Floats, target: Floats) -> Floats:
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), dtype=bool)
    for _ in range(3 * len(x)):
        gain = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        if gain.max(initial=-np.inf) <= _TOLERANCE:
            break
        free[gain.argmax()] = True
        x = _settle(matrix, target, x, free)
    return x


def _settle(matrix: Floats, target: Floats, x: Floats, free: NDArray[np.bool_]) -> Floats:
    """Solves for the free ones; those that would turn negative on the way are fixed at 0."""
    while True:
        solved = np.zeros_like(x)
        solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        falling = free & (solved <= 0)
        if not falling.any():
            return solved
        share = (x[falling] / (x[falling] - solved[falling])).min()
        x = x + share * (solved - x)
        free &= x > _TOLERANCE
