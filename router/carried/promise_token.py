"""A refusal's promise, as its client carries it to any router of the cluster. Pure.

It is signed, and good for the request that it was made to: the same prompt, tenant, tier, `n` and
`max_tokens`. Its time is of the wall clock, since routers are on several hosts.
"""

from __future__ import annotations

from kvrelay.types import value
from router.carried.signing import digest_of
from router.core.promises.work import Promised, ToldPromise
from router.core.state.generation import GenerationRequest


@value
class PromiseToken:
    promise_id: int
    due_at_s: float
    request: str
    tier: str
    prefill_s: float
    sequences: float
    kv_tokens: float
    again: bool

    @classmethod
    def of(cls, asked: GenerationRequest, told: ToldPromise, now_s: float) -> PromiseToken:
        """`now_s`: of the wall clock."""
        return cls(
            promise_id=told.promise_id,
            due_at_s=now_s + told.due_in_s,
            request=_digest_of(asked),
            tier=asked.qos_tier,
            prefill_s=float(told.work.prefill_s),
            sequences=float(told.work.sequences),
            kv_tokens=float(told.work.kv_tokens),
            again=told.again,
        )

    def told_to(self, asked: GenerationRequest, now_s: float) -> ToldPromise | None:
        """None: it was made to another request."""
        if (self.request, self.tier) != (_digest_of(asked), asked.qos_tier):
            return None
        work = Promised(
            prefill_s=self.prefill_s, sequences=self.sequences, kv_tokens=self.kv_tokens
        )
        return ToldPromise(
            promise_id=self.promise_id,
            due_in_s=self.due_at_s - now_s,
            work=work,
            again=self.again,
        )


def _digest_of(asked: GenerationRequest) -> str:
    sampling = asked.sampling
    return digest_of(asked.prompt_ids, asked.tenant, sampling.max_tokens, sampling.n)
