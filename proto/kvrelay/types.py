"""Values that every part agrees on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

Incarnation = NewType("Incarnation", str)
"""Random id of one process life: a restarted worker is a new peer."""

WIRE_VERSION = 1
"""1: first."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Tier(StrEnum):
    """Of the memory that cached blocks lie in."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class PrefixOrigin(StrEnum):
    """Where the KV of a sequence's first tokens came from; `device` is the worker's own cache."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"
    COMPUTED = "computed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """One try of one request. What an old attempt says is dropped."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Resolved sampling parameters of one request, validated at the router.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep everything. `stop_token_ids` already
    holds the model's end-of-sequence ids unless the request ignores them. `logprobs` is the
    number of top alternatives reported beside the chosen token, None for no logprobs at all.
    """

    max_tokens: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a worker is told about a request: token ids in, sampling parameters, nothing of text.

    Requests of different `tenant`s share no cached KV.
    """

    key: RequestKey
    prompt_ids: Sequence[int]
    sampling: Sampling
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms: of the chosen token, and of the most likely ones, best first.

    Taken from the distribution before temperature and truncation, after penalties and bias.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
