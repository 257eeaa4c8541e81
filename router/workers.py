"""The workers as this router sees them, and the places it has taken there. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, RequestKey, RequestSpec
from router.admission import Refusal, refusal_of
from router.placement import Placement, WorkerView, least_loaded


class Workers(dict[Incarnation, WorkerView]):
    """Those connected. A place stays taken until the worker says that it is free."""

    def join(self, hello: WorkerHello) -> None:
        self[hello.incarnation] = WorkerView(hello=hello)

    def find(
        self, spec: RequestSpec, tried: set[Incarnation], otherwise: Refusal
    ) -> Placement | Refusal:
        """Skips workers that would refuse, and adds them to `tried`; the last one's refusal, or
        `otherwise`, when none is left."""
        refusal = otherwise
        while (found := least_loaded(spec, self.values(), tried=tried)) is not None:
            full = refusal_of(spec, self[found.decode])
            if full is None:
                return found
            refusal = full
            tried.add(found.decode)
        return refusal

    def book(self, spec: RequestSpec, placement: Placement) -> None:
        self[placement.decode].sequences[spec.key] = spec.sampling.n
        if placement.prefill is not None:
            self[placement.prefill].prompt_tokens[spec.key] = len(spec.prompt_ids)

    def prefilled(self, key: RequestKey, legs: Iterable[Incarnation]) -> None:
        """Its prompt is ahead of no other request any more."""
        for leg in legs:
            if leg in self:
                self[leg].prompt_tokens.pop(key, None)

    def forget(self, key: RequestKey, legs: Iterable[Incarnation]) -> None:
        for leg in legs:
            if leg in self:
                self[leg].forget(key)
