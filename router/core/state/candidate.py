"""A way to serve a request, and what is predicted of it. Pure values."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, Objectives, Role, value
from router.core.load.decode_outlook import BatchThen, Likely
from router.core.promises.work import Promised
from router.core.state.quarantine import Pair, Placement
from router.core.state.worker_view import WorkerView

Way = tuple[Incarnation, Incarnation | None, Incarnation | None]
"""Who decodes, who prefills, and whom that one may fetch a prefix from."""
PromptWay = tuple[Incarnation, bool, Incarnation | None]
"""Who prefills, whether it decodes too, and whom it may fetch a prefix from."""


@value
class Candidate:
    """`prefill` None: the decode worker prefills too. `source`: who has more of the prompt than
    the one that prefills."""

    decode: WorkerView
    prefill: WorkerView | None
    source: PrefixSource | None = None

    @property
    def placement(self) -> Placement:
        prefill = None if self.prefill is None else self.prefill.incarnation
        return Placement(decode=self.decode.incarnation, prefill=prefill)

    @property
    def pair(self) -> Pair | None:
        """None where one worker does all."""
        if self.prefill is None:
            return None
        return Pair(self.prefill.incarnation, self.decode.incarnation)

    @property
    def way(self) -> Way:
        prefill = None if self.prefill is None else self.prefill.incarnation
        source = None if self.source is None else self.source.peer
        return self.decode.incarnation, prefill, source

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its workers, in the order in which KV travels."""
        decode = self.decode.hello.name
        return (decode,) if self.prefill is None else (self.prefill.hello.name, decode)

    @property
    def is_local(self) -> bool:
        """A decode worker computes the prompt itself, in steps that it shares with its batch."""
        return self.prefill is None and self.decode.own_role is Role.DECODE

    @property
    def computes_prompt(self) -> bool:
        """False where the first worker has decoded the request, and only hands it over."""
        return self.prefill is None or self.prefill.own_role is Role.PREFILL

    @property
    def prefiller(self) -> WorkerView:
        return self.prefill or self.decode


@value
class PromptPrediction:
    """Seconds from now until the first token, by what they are spent on. So much longer (`pause_s`)
    those wait for their tokens in whose steps it is computed. Asking the decode worker and telling
    the prefill worker takes `messages_s`, while the queue gets shorter."""

    queue_s: float
    pull_s: float
    prefill_s: float
    pause_s: float = 0.0
    messages_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        queue_s, messages_s = self.queue_s, self.messages_s
        starts_s = messages_s if messages_s > queue_s else queue_s
        return starts_s + self.pull_s + self.prefill_s


class Arrival(NamedTuple):
    """At the decode worker, whatever the output: `joins_in_s` from now, after which its tokens are
    `paused_s` late in all. The batches are those that it finds there."""

    prompt: PromptPrediction
    joins_in_s: float
    paused_s: float
    batches: Likely


@value
class DecodePrediction:
    """Of a decode worker when the request joins, `joins_in_s` from now: `batch` are all that may be
    there without it, `step_s` a step with those that will be there on average, and it. Free blocks
    are those that are left without it."""

    joins_in_s: float
    batch: BatchThen
    step_s: float
    needed_blocks: int
    free_blocks: int


@value
class Prediction:
    """`ttft_s` counts from when the request was received. With the margins' confidence neither will
    be more than the `at_most` values."""

    prompt: PromptPrediction
    decode: DecodePrediction
    ttft_s: float
    tpot_s: float
    ttft_at_most_s: float
    tpot_at_most_s: float
    completes_in_s: float
    choices: int
    kv_tokens: int
    asked: Objectives

    @property
    def shares(self) -> dict[str, float]:
        """# ttft, tpot |-> predicted over asked for, where both are known"""
        pairs = (("ttft", self.ttft_s, self.asked.ttft_s), ("tpot", self.tpot_s, self.asked.tpot_s))
        return {kind: s / most_s for kind, s, most_s in pairs if most_s and s < inf}

    @property
    def work(self) -> Promised:
        """What it would take of a prefill and of a decode worker."""
        prefill_s = self.prompt.pull_s + self.prompt.prefill_s
        return Promised(prefill_s=prefill_s, sequences=self.choices, kv_tokens=self.kv_tokens)
