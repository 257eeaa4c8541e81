"""Puts what workers say of one choice into index order, each token once. Pure.

An attempt's first token comes from another worker than those after it, and a request of several
choices that is run again yields the same tokens again: they arrive early, late and twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.messages import Tokens
from router.generation import ChoiceTokens


@dataclass(slots=True, kw_only=True)
class TokenOrder:
    choice: int
    delivered: list[int] = field(default_factory=list)
    finished: bool = False
    _early: dict[int, Tokens] = field(default_factory=dict)  # first index |-> overtook another

    @property
    def next_index(self) -> int:
        return len(self.delivered)

    def take(self, event: Tokens) -> list[ChoiceTokens]:
        """What can be delivered now."""
        self._early[event.first_index] = event
        ready: list[ChoiceTokens] = []
        while due := [index for index in self._early if index <= self.next_index]:
            ready += self._new(self._early.pop(min(due)))
        return ready

    def forget_early(self) -> None:
        """Another attempt yields them again."""
        self._early.clear()

    def _new(self, event: Tokens) -> list[ChoiceTokens]:
        """The event less what was delivered before."""
        skip = self.next_index - event.first_index
        is_new = skip < len(event.token_ids) or not event.token_ids  # an end without a token
        if self.finished or not is_new:
            return []
        self.delivered += event.token_ids[skip:]
        self.finished = event.finish_reason is not None
        tokens = ChoiceTokens(
            choice=self.choice,
            token_ids=event.token_ids[skip:],
            logprobs=event.logprobs[skip:],
            finish_reason=event.finish_reason,
            stop_token_id=event.stop_token_id,
        )
        return [tokens]
