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

    def times_usual(self, demand: Demand) -> float:
        """How many times as long as usual its prompt is; 1 as long as none has been seen."""
        return demand.prompt_tokens / self.tokens if self.tokens else 1.0
