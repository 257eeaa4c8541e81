"""The workers as this router sees them, and the places it has taken there. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, RequestKey, RequestSpec, Role
from router.admission import Refusal, refusal_of
from router.generation import ModelFacts
from router.placement import Objections, Placement, WorkerView, least_loaded, trusted


class Workers(dict[Incarnation, WorkerView]):
    """Those connected. A place stays taken until the worker says that it is free."""

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that some pair of workers, or one of role both, can hold; 0 when
        none can serve."""
        longest = dict.fromkeys(Role, 0)
        for view in self.values():
            role = view.hello.role
            longest[role] = max(longest[role], view.hello.max_model_len)
        return max(longest[Role.BOTH], min(longest[Role.PREFILL], longest[Role.DECODE]))

    @property
    def most_places(self) -> int:
        """Of one worker that decodes; 0 without any."""
        hellos = [view.hello for view in self.values() if view.hello.role is not Role.PREFILL]
        return max((hello.max_running_requests for hello in hellos), default=0)

    def model(self) -> ModelFacts | None:
        """What they serve, as the first one says; None without any."""
        hello = next((view.hello for view in self.values()), None)
        if hello is None:
            return None
        return ModelFacts(
            architecture=hello.architecture,
            fingerprint=hello.fingerprint,
            max_model_len=self.longest_tokens or hello.max_model_len,
            vocab_size=hello.vocab_size,
        )

    def name_of(self, worker: Incarnation) -> str:
        """Its incarnation where it isn't here (any more)."""
        view = self.get(worker)
        return view.hello.name if view is not None else worker

    def join(self, hello: WorkerHello) -> None:
        self[hello.incarnation] = WorkerView(hello=hello)

    def find(
        self,
        spec: RequestSpec,
        tried: set[Incarnation],
        otherwise: Refusal,
        objections: Objections = trusted,
    ) -> Placement | Refusal:
        """Skips workers that would refuse, and adds them to `tried`; the last one's refusal, or
        `otherwise`, when none is left."""
        refusal = otherwise
        while True:
            found = least_loaded(spec, self.values(), tried=tried, objections=objections)
            if found is None:
                return refusal
            full = refusal_of(spec, self[found.decode])
            if full is None:
                return found
            refusal = full
            tried.add(found.decode)

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
