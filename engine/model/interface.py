"""The entry from transformers' models to kvrelay's own attention. Runs in the worker.

Model families look the implementation up by its name. The `AttentionState` in a `ContextVar`, set
around the forward pass, defines what a layer's call does in this step. In between is one
`torch.library` operator, so that graph captures see attention as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

NAME = "kvrelay"


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns queries and keys into weights, beyond plain softmax attention.

    `softcap` c replaces each score s by c * tanh(s / c) (Gemma 2); `sinks` `[heads]` are logits
    that take weight and give no value (GPT-OSS). `window` includes the token itself.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class AttentionState(Protocol):
    """The KV that the attention of one forward pass reads and writes."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """`query` `[1, heads, tokens, dim]`, `key` and `value` `[1, kv_heads, tokens, dim]`, not
        yet cached. Returns `[1, tokens, heads, value_dim]`."""


class Rotates(Protocol):
    """An AttentionState that rotates queries and keys itself, while it stores the new KV."""

    def attend_rotating(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """As `attend`, but neither `query` nor `key` has its rotary embedding yet; the angles are
        `[1, 1, tokens, dim]`."""


_STATE: ContextVar[AttentionState] = ContextVar("kvrelay_attention")

_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, int layer, float scaling, int? window, "
    "float? softcap, Tensor? sinks) -> Tensor"
)
OPERATOR = torch.ops.kvrelay.attention.default
"""One layer's attention, as graph captures see it."""


@contextmanager
def attention_state(state: AttentionState) -> Iterator[None]:
    """Every attention layer called in this context uses `state`."""
    token = _STATE.set(state)
    try:
        yield
    finally:
        _STATE.reset(token)


def current_state() -> AttentionState:
    return _STATE.get()


@torch.library.impl(_LIBRARY, "attention", "CompositeExplicitAutograd")
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = Scores(scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    return _STATE.get().attend(layer, query, key, value, scores)


@torch.library.register_fake("kvrelay::attention", lib=_LIBRARY)
def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
