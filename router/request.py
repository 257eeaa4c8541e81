"""One request as the router follows it: its tries, the workers it needs, its tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvrelay.messages import Lifetime, PromptLogprobs, Tokens
from kvrelay.qos import QosTier
from kvrelay.types import (
    Incarnation,
    Objectives,
    PromptLogprob,
    RequestKey,
    RequestSpec,
    Sampling,
)
from router.admitting.policy import Admitted
from router.candidate import Candidate, Prediction
from router.generation import ChoiceTokens, GenerationRequest
from router.latency.errors import prediction_errors
from router.ledger import Ledger
from router.placement import Pair, Placement
from router.promises import Promise, digest_of
from router.token_order import TokenOrder

FEWEST_TOKENS = 4
"""The time per token of fewer says little."""


@dataclass(slots=True, kw_only=True)
class Request:
    """`attempt` names this try: no two tries of this router share one. `tried` are the decode
    workers that were asked in it, `avoided` the pairs that failed earlier ones."""

    submitted: GenerationRequest
    tier: QosTier
    ledger: Ledger
    attempt: int
    tries: int = 1
    placed: Admitted | None = None
    placed_s: float = 0.0
    reserved_s: float = 0.0  # when its decode worker had taken it
    tried: set[Incarnation] = field(default_factory=set)
    avoided: set[Pair] = field(default_factory=set)
    admitted: bool = False
    committed: bool = False  # this attempt's KV is at the decode worker
    predicted: Prediction | None = None  # when its first attempt was placed
    promise: Promise | None = None  # that it came back for
    capped_tokens: int | None = None  # what its output was cut to, so as to serve it
    found_tokens: int | None = None  # in a cache, by the first prefill that began
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    moves: int = 0  # to other decode workers
    stood_back_s: float = 0.0  # for others, while it decoded
    prefill_worker: Incarnation | None = None  # has its prompt, or gets it when there is a place
    digest: int = field(init=False)  # by which it is known when it comes again
    key: RequestKey = field(init=False)
    emitted_ids: tuple[int, ...] = ()  # delivered before this attempt, which goes on behind them
    resumed: tuple[tuple[int, ...], ...] = ()  # the same where these are not the prompt's
    choices: tuple[TokenOrder, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.key = RequestKey(self.request_id, self.attempt)
        self.digest = digest_of(self.submitted)
        self.choices = tuple(TokenOrder(choice=i) for i in range(self.submitted.sampling.n))

    @property
    def request_id(self) -> str:
        return self.submitted.request_id

    @property
    def placement(self) -> Placement | None:
        return None if self.placed is None else self.placed.candidate.placement

    @property
    def pair(self) -> Pair | None:
        """None where one worker does all."""
        return self.placement.pair if self.placement else None

    def links(self) -> Iterator[Pair]:
        """From whom to whom its KV travels between workers."""
        if self.placed is None:
            return
        candidate = self.placed.candidate
        if candidate.source is not None and not candidate.source.is_pool_node:
            yield Pair(candidate.source.peer, candidate.prefiller.incarnation)
        if self.pair is not None:
            yield self.pair

    @property
    def spec(self) -> RequestSpec:
        asked = self.submitted
        return RequestSpec(
            key=self.key,
            prompt_ids=asked.prompt_ids,
            sampling=self.sampling,
            tenant=asked.tenant,
            qos_tier=self.tier.name,
            tpot_s=self.objectives.tpot_s,
            emitted_ids=self.emitted_ids,
            resumed=self.resumed,
            finished_choices=tuple(c.choice for c in self.choices if c.finished),
        )

    @property
    def sampling(self) -> Sampling:
        asked, most = self.submitted.sampling, self.capped_tokens
        if self.prompt_logprobs and self.is_scored:
            asked = replace(asked, prompt_logprobs=None)
        return asked if most is None else replace(asked, max_tokens=most)

    @property
    def is_scored(self) -> bool:
        """The log probabilities of all tokens of its prompt are here, but for the first's."""
        return len(self.prompt_logprobs) == len(self.submitted.prompt_ids) - 1

    @property
    def objectives(self) -> Objectives:
        """Its own, else those of its tier."""
        return self.submitted.objectives.or_else(self.tier.objectives)

    def within_s(self, now_s: float) -> float | None:
        """How soon its first token is due; None: whenever."""
        ttft_s = self.objectives.ttft_s
        return None if ttft_s is None else ttft_s - self.ledger.age_s(now_s)

    @property
    def cached_tokens(self) -> int:
        """Of its prompt: a later attempt may also find what was emitted before."""
        return min(self.found_tokens or 0, len(self.submitted.prompt_ids))

    @property
    def done(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def prediction_errors(self) -> dict[str, float]:
        """# ttft, tpot |-> predicted by actual seconds; none once it had to be run again"""
        if self.predicted is None or self.disturbed:
            return {}
        tokens = max(choice.next_index for choice in self.choices)
        return prediction_errors(self.predicted, self.ledger, tokens)

    def take(self, event: Tokens) -> list[ChoiceTokens]:
        """What can be delivered now."""
        self.stood_back_s = max(self.stood_back_s, event.stood_back_s)
        return self.choices[event.choice].take(event)

    def tpot_s(self, *, less_s: float = 0.0) -> float | None:
        """Of its longest choice, `less_s` in all; None for one that had to be run again, or is
        short."""
        tokens = max(choice.next_index for choice in self.choices)
        first_s, last_s = map(self.ledger.after_s, ("first_token_received", "last_token_received"))
        if self.disturbed or tokens < FEWEST_TOKENS or first_s is None or last_s is None:
            return None
        return max(0.0, last_s - first_s - less_s) / (tokens - 1)

    @property
    def disturbed(self) -> bool:
        """It was run again, or moved: how long it took says nothing of the first prediction."""
        return self.tries > 1 or self.moves > 0

    @property
    def decodes(self) -> bool:
        """It is past the first token of this attempt."""
        return any(choice.next_index > choice.resumed for choice in self.choices)

    @property
    def handed_over(self) -> bool:
        """KV and first tokens have left the prefill worker: it may die now. It draws none for the
        choices that had some before this attempt, other than those of the prompt."""
        since = self.resumed
        drawn = (c for c in self.choices if not (c.finished or (since and since[c.choice])))
        return self.committed and all(choice.next_index > choice.resumed for choice in drawn)

    @property
    def legs(self) -> tuple[Incarnation, ...]:
        """The workers that this attempt still needs."""
        if self.placed is None:
            return ()
        decode = self.placed.candidate.decode.incarnation
        if self.prefill_worker is None or self.handed_over:
            return (decode,)
        return (decode, self.prefill_worker)

    def decodes_at(self, worker: Incarnation) -> bool:
        """This attempt's decode worker is that one."""
        return self.placed is not None and self.placed.candidate.decode.incarnation == worker

    def place(self, admitted: Admitted, now_s: float) -> None:
        self.placed = admitted
        self.placed_s = now_s
        self.prefill_worker = admitted.candidate.placement.prefill
        self.ledger.is_local = admitted.candidate.is_local
        if not self.disturbed:
            self.predicted = admitted.prediction
        self.tried.add(admitted.candidate.decode.incarnation)
        self.ledger.mark("placed", now_s)

    def keep_prompt(self) -> None:
        """Its prompt waits at the router: any prefill worker may get it."""
        self.prefill_worker = None

    def give_prompt(self, candidate: Candidate, now_s: float) -> None:
        """Its prompt has waited at the router, and goes to the prefill worker of `candidate`."""
        assert self.placed is not None
        self.placed = replace(self.placed, candidate=candidate)
        self.prefill_worker = candidate.placement.prefill
        self.ledger.mark("dispatched", now_s)

    def cap(self, max_tokens: int) -> None:
        if max_tokens < self.submitted.sampling.max_tokens:
            self.capped_tokens = max_tokens

    def lived(self, moment: Lifetime) -> None:
        """A worker has got so far with it."""
        self.committed |= moment.name == "handoff_committed"
        if moment.name == "prefill_started" and self.found_tokens is None:
            self.found_tokens = moment.tokens
        self.ledger.mark(moment.name, moment.at_s)

    def scored(self, event: PromptLogprobs) -> None:
        """What an earlier attempt has told is dropped."""
        known = 1 + len(self.prompt_logprobs) - event.first_position
        if known >= 0:
            self.prompt_logprobs += event.entries[known:]

    def try_again(self, attempt: int) -> None:
        """As `begin_again`, after a failure."""
        self.tries += 1
        self.begin_again(attempt)

    def begin_again(self, attempt: int) -> None:
        """What the old attempt still says is dropped. Each choice goes on behind the tokens that
        were delivered."""
        if len(self.choices) == 1:
            self._begin(attempt, emitted_ids=tuple(self.choices[0].delivered))
        else:
            self._begin(attempt, emitted_ids=())

    def move(self, spec: RequestSpec) -> None:
        """It goes on as `spec` says, and behind what was delivered since."""
        self.moves += 1
        self._begin(spec.key.attempt, emitted_ids=spec.emitted_ids)

    def _begin(self, attempt: int, emitted_ids: tuple[int, ...]) -> None:
        self.attempt = attempt
        self.key = RequestKey(self.request_id, attempt)
        self.placed = None
        self.committed = False
        self.tried.clear()
        for choice in self.choices:
            choice.begin_again()
        first = len(emitted_ids)
        since = tuple(() if c.finished else tuple(c.delivered[first:]) for c in self.choices)
        self.emitted_ids, self.resumed = emitted_ids, since if any(since) else ()
