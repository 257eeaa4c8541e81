"""A stage of a pipeline: consecutive layers of a model, in a process of its own. Hidden states come
from the stage before, and go to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

from engine.device.group import Line

_MADE_UP = 257


class Stage:
    """Until it is `joined` it computes alone, on made-up hidden states, so that each stage can be
    checked by itself."""

    def __init__(self, index: int, count: int, layers: range, line: Line) -> None:
        self.index = index
        self.count = count
        self.layers = layers
        self._line = line
        self._joined = False
        self._tokens: int | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def join(self) -> None:
        """From now on its hidden states come from other stages, and go there."""
        self._joined = True

    @contextmanager
    def joined(self) -> Iterator[None]:
        """All stages do this at the same time."""
        self._joined = True
        try:
            yield
        finally:
            self._joined = False

    def expect(self, tokens: int) -> None:
        """The next pass has this many. A stage may compute some more, to fill up its products."""
        self._tokens = tokens

    def receive(self, ids: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Hidden states of the tokens `ids` `[batch, tokens]`."""
        if not self._joined:
            return _made_up(ids, hidden, dtype)
        tokens = ids.shape[1] if self._tokens is None else self._tokens
        found = self._line.receive((ids.shape[0], tokens, hidden), dtype)
        missing = ids.shape[1] - tokens
        return pad(found, (0, 0, 0, missing)) if missing else found

    def send(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._joined:
            self._line.send(hidden[:, : self._tokens])
        return hidden


def _made_up(ids: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """As different as embeddings; the same for the same ids."""
    numbers = torch.Generator().manual_seed(hidden)
    rows = torch.randn(_MADE_UP, hidden, generator=numbers).to(ids.device, dtype)
    return rows[ids % _MADE_UP]
