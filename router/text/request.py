"""What is asked, once it is read from either API. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.types import (
    NO_OBJECTIVES,
    Objectives,
)
from router.access.caller import ANYBODY, Caller
from router.access.limits import Booking
from router.carried.continuation import Continuation
from router.text.sampling import RequestedSampling


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


PromptInput = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """`tier` is the QoS tier. `tenant` names the part of the cache that it uses: what its caller's
    `space` says. `received_s`: perf_counter at the request's first byte. `continuation`: another
    router has begun with it. `promise`: what it was told with a refusal. `booking`: what its key
    has paid for it already."""

    request_id: str
    prompt: PromptInput
    sampling: RequestedSampling
    model: str = ""
    caller: Caller = ANYBODY
    tenant: str = ""
    tier: str = ""
    objectives: Objectives = NO_OBJECTIVES
    add_special_tokens: bool = True
    continuation: Continuation | None = None
    promise: bytes = b""
    booking: Booking | None = None
    received_s: float = field(default_factory=time.perf_counter)

    @property
    def own_id(self) -> str:
        """Its id inside the cluster."""
        return self.caller.own_id(self.request_id)
