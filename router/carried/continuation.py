"""A request that lost its router goes on at another one, behind what was delivered. Pure.

The client sends what it has: the tokens of each choice, and a signed ticket. A ticket proves that a
router has admitted the request, so no other refuses it. It names what may not change: the request,
its prompt, its tier and the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.errors import InvalidRequest
from kvrelay.types import value
from router.carried.signing import digest_of

VALID_S = 3600.0
"""A request without a deadline can be continued for so long."""


@value
class Delivered:
    """Of one choice. `finished`: its finish reason has come."""

    token_ids: tuple[int, ...]
    finished: bool = False


@value
class Continuation:
    """`ticket` empty: there is none."""

    choices: tuple[Delivered, ...]
    ticket: bytes = b""

    def check(self, n: int, max_tokens: int, vocab_size: int) -> None:
        """Raises InvalidRequest."""
        if len(self.choices) != n:
            raise _invalid(f"it has {len(self.choices)} choices, and n is {n}")
        if all(one.finished for one in self.choices):
            raise _invalid("all its choices are finished")
        if any(len(one.token_ids) >= max_tokens for one in self.choices if not one.finished):
            raise _invalid(f"a choice that goes on has {max_tokens} tokens or more already")
        ids = (token_id for one in self.choices for token_id in one.token_ids)
        if any(token_id >= vocab_size for token_id in ids):
            raise _invalid(f"a token id is out of the vocabulary [0, {vocab_size})")


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"this can't be continued: {why}", param="continuation")


@value
class Ticket:
    """`request_id` is the client's. `prompt`: a digest of it, and of the part of the cache that it
    is in, so a ticket is of no use to another tenant. `until_s` is of the wall clock: routers are
    on several hosts."""

    request_id: str
    prompt: str
    tier: str
    fingerprint: str
    until_s: float

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        tier: str,
        fingerprint: str,
        *,
        space: str = "",
        until_s: float,
    ) -> Ticket:
        return cls(
            request_id=request_id,
            prompt=digest_of(prompt_ids, space),
            tier=tier,
            fingerprint=fingerprint,
            until_s=until_s,
        )

    def admits(self, asked: Ticket) -> bool:
        """`asked` is that of the request that came, perhaps with another id; its time is now.

        Raises InvalidRequest if the cluster serves another model by now.
        """
        if self.fingerprint != asked.fingerprint:
            raise _invalid("the cluster serves another model by now")
        same = (self.prompt, self.tier) == (asked.prompt, asked.tier)
        return same and asked.until_s < self.until_s
