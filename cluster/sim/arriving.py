"""Prompts of a trace that arrive in parts: what has come is computed while the rest is on its way,
as `router.arriving` does it live. Pure.

A prompt's last part comes when the trace says that the request arrives, and its other tokens come
evenly before that. Times to first tokens count from the last part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config.simulation import ArrivingSection
from cluster.sim.machines.clock import Clock
from cluster.sim.trace import TraceArrival, TracePrompt
from router.arriving.pieces import PROMPT_ONLY, REFUSED_S, SETTLE_S, next_tokens
from router.core.events import Aborted, Admit, Deliver, Event, Fail, Refuse, Submitted
from router.core.state.generation import GenerationRequest


class Router(Protocol):
    def hear(self, event: Event) -> None: ...


@dataclass(slots=True)
class _Prompt:
    """`running`: the request ahead, for all tokens up to `asked_tokens`; empty: none runs. `waits`:
    all of the prompt is there, and waits for that one."""

    arrival: TraceArrival
    number: int
    router: Router
    begun_s: float
    computed: int = 0
    asked: int = 0
    asked_tokens: int = 0
    running: str = ""
    not_before_s: float = 0.0
    is_whole: bool = False
    waits: bool = False


class PromptParts:
    """`submit` is told the number of a request whose whole prompt is to go to its router."""

    def __init__(
        self,
        clock: Clock,
        section: ArrivingSection,
        block_size: int,
        submit: Callable[[int], None],
    ) -> None:
        self._clock = clock
        self._section = section
        self._block_size = block_size
        self._submit = submit
        self._prompts: dict[int, _Prompt] = {}
        self._running: dict[str, _Prompt] = {}  # request ahead |-> its prompt
        self.computed_tokens = 0
        self.are_any = False

    def expect(self, number: int, arrival: TraceArrival, router: Router) -> None:
        """Its first part comes in time."""
        begun_s = max(0.0, arrival.request.arrival_s - self._section.over)
        prompt = _Prompt(arrival, number, router, begun_s)
        self._prompts[number] = prompt
        self.are_any = True
        self._clock.at(begun_s, self._part, prompt)

    def _part(self, prompt: _Prompt) -> None:
        if not prompt.is_whole:
            self._clock.after(self._section.every, self._part, prompt)
            self._look(prompt)

    def _look(self, prompt: _Prompt) -> None:
        now_s, request = self._clock.now_s, prompt.arrival.request
        if prompt.running or prompt.is_whole or now_s < prompt.not_before_s:
            return
        share = (now_s - prompt.begun_s) / max(1e-9, request.arrival_s - prompt.begun_s)
        known = int(min(1.0, share) * request.input_tokens)
        tokens = next_tokens(known, prompt.computed, self._block_size)
        if tokens:
            self._ask(prompt, tokens)

    def _ask(self, prompt: _Prompt, tokens: int) -> None:
        prompt.asked += 1
        prompt.asked_tokens = tokens
        prompt.running = f"{prompt.number}-ahead-{prompt.asked}"
        self._running[prompt.running] = prompt
        part = replace(prompt.arrival.request, input_tokens=tokens)
        asked = GenerationRequest(
            request_id=prompt.running,
            prompt_ids=TracePrompt(part, prompt.number, prompt.arrival.prompt.copy),
            sampling=PROMPT_ONLY,
            tenant=part.tenant,
            is_ahead=True,
        )
        prompt.router.hear(Submitted(request=asked))

    def arrived(self, number: int) -> None:
        """The last part: what runs may finish for a moment."""
        prompt = self._prompts[number]
        prompt.is_whole = True
        if prompt.running:
            prompt.waits = True
            self._clock.after(SETTLE_S, self._give_up, prompt)
        else:
            self._submit(number)

    def _give_up(self, prompt: _Prompt) -> None:
        if prompt.waits:
            router, name = prompt.router, prompt.running
            self._over(prompt)
            router.hear(Aborted(request_id=name))

    def hear(self, command: Admit | Refuse | Deliver | Fail) -> bool:
        """Whether it was for a request ahead."""
        prompt = self._running.get(command.request_id)
        match command:
            case _ if prompt is None:
                return "-" in command.request_id  # one that was given up
            case Deliver(done=True):
                self.computed_tokens += prompt.asked_tokens - prompt.computed
                prompt.computed = prompt.asked_tokens
                self._over(prompt)
            case Refuse(refusal=refusal):
                prompt.not_before_s = self._clock.now_s + (refusal.retry_after_s or REFUSED_S)
                self._over(prompt)
            case Fail():
                prompt.not_before_s = self._clock.now_s + REFUSED_S
                self._over(prompt)
            case _:
                pass
        return True

    def _over(self, prompt: _Prompt) -> None:
        del self._running[prompt.running]
        prompt.running = ""
        if prompt.waits:
            prompt.waits = False
            self._submit(prompt.number)
        else:
            self._look(prompt)
