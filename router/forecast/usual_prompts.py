"""How long the prompts are that a router takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.demand import Demand

_NEW_SHARE = 0.02


@dataclass(slots=True)
class UsualPrompts:
    """Of those taken: where long ones are refused, usual ones get shorter, until there is room."""

    tokens: float = 0.0
    _seen: int = 0

    def saw(self, prompt_tokens: int) -> None:
        self._seen += 1
        share = max(_NEW_SHARE, 1 / self._seen)
        self.tokens += share * (prompt_tokens - self.tokens)

    def longer_by(self, demand: Demand) -> int:
        """By how many tokens, of all its choices; 0 before any was seen."""
        longer = demand.prompt_tokens - self.tokens if self.tokens else 0
        return demand.choices * round(longer)
