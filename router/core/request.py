"""One request as the router follows it: its tries, the workers it needs, its tokens. Pure.

Where a request's time went: named moments whose gaps are the phases. Pure.

Moments of workers are put on the router's clock by their age when they arrive, so a hop's two ways
are both charged to the phase that waits for the answer. Phases up to `first_token_return` sum to
the time to first token, all of them to the whole.

Puts what workers say of one choice into index order, each token once. Pure.

An attempt's first token comes from another worker than those after it: they may overtake it.

What was predicted of a request, beside what it really took. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvrelay.messages import Lifetime, PromptLogprobs, Tokens
from kvrelay.qos import QosTier
from kvrelay.types import Incarnation, Objectives, PromptLogprob, RequestKey, RequestSpec, Sampling
from router.core.policy.admission import Admitted
from router.core.state.candidate import Candidate, Prediction
from router.core.state.generation import ChoiceTokens, GenerationRequest
from router.core.state.promises import Promise, digest_of
from router.core.state.quarantine import Pair, Placement
from router.core.state.story import LIFETIMES, Moment, Story, found, submission

# moment |-> the phase that ends with it
PHASES: dict[str, str] = {
    "placed": "place",
    "reserved": "reserve",
    "dispatched": "router_queue",
    "prefill_received": "dispatch",
    "prefill_started": "prefill_queue",
    "first_token": "prefill",
    "first_token_received": "first_token_return",
    "handoff_committed": "handoff",
    "decode_joined": "decode_queue",
    "last_token": "decode",
    "last_token_received": "last_token_return",
}


@dataclass(slots=True)
class Ledger:
    """`before_s` are the phases before submission, as the face measured them."""

    before_s: Mapping[str, float]
    submitted_s: float
    is_local: bool = False  # a decode worker computes the prompt, though there are others for that
    _moments: dict[str, float] = field(default_factory=dict)

    def mark(self, moment: str, at_s: float) -> None:
        """Known moments count once, `last_token*` each time."""
        if moment in PHASES and (moment not in self._moments or moment.startswith("last_")):
            self._moments[moment] = at_s

    def age_s(self, now_s: float) -> float:
        """Since the face received it."""
        return self.before_submission_s + now_s - self.submitted_s

    @property
    def before_submission_s(self) -> float:
        return sum(self.before_s.values())

    def after_s(self, moment: str) -> float | None:
        """Since submission, on the router's clock; None before it."""
        at_s = self._moments.get(moment)
        return None if at_s is None else at_s - self.submitted_s

    def phases(self) -> dict[str, float]:
        """# phase |-> seconds, in order"""
        phases = dict(self.before_s)
        previous_s = self.submitted_s
        for moment, at_s in self._in_order():
            phase = PHASES[moment]
            if self.is_local and phase == "prefill":
                phase = "local_prefill"
            phases[phase] = max(0.0, at_s - previous_s)
            previous_s = max(previous_s, at_s)
        return phases

    def _in_order(self) -> list[tuple[str, float]]:
        """Moments in their logical order. A batch that was read late dates its moments late, so
        none is later than those that follow it."""
        ordered: list[tuple[str, float]] = []
        latest_s = float("inf")
        for moment in reversed(PHASES):
            if moment in self._moments:
                latest_s = min(latest_s, self._moments[moment])
                ordered.append((moment, latest_s))
        return ordered[::-1]


@dataclass(slots=True, kw_only=True)
class TokenOrder:
    choice: int
    delivered: list[int] = field(default_factory=list)
    finished: bool = False
    resumed: int = 0  # tokens delivered before this attempt, which goes on behind them
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

    def begin_again(self) -> None:
        """Another attempt goes on behind what was delivered."""
        self._early.clear()
        self.resumed = self.next_index

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


class Predicted(Protocol):
    """From when the face received it to the first token, and for each token after it."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float: ...


def prediction_errors(predicted: Predicted, ledger: Ledger, tokens: int) -> dict[str, float]:
    """# ttft, tpot |-> predicted by actual seconds, of those that are known

    `tokens` are those of the longest choice.
    """
    first_s, last_s = ledger.after_s("first_token_received"), ledger.after_s("last_token_received")
    ratios: dict[str, float] = {}
    if first_s:
        ratios["ttft"] = predicted.ttft_s / (ledger.before_submission_s + first_s)
    if first_s and last_s and tokens > 1 and last_s > first_s:
        ratios["tpot"] = predicted.tpot_s * (tokens - 1) / (last_s - first_s)
    return ratios


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
    worker_names: tuple[str, ...] = ()  # of its latest placement: who prefills, who decodes
    story: Story = field(init=False)
    digest: int = field(init=False)  # by which it is known when it comes again
    key: RequestKey = field(init=False)
    emitted_ids: tuple[int, ...] = ()  # delivered before this attempt, which goes on behind them
    resumed: tuple[tuple[int, ...], ...] = ()  # the same where these are not the prompt's
    choices: tuple[TokenOrder, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.key = RequestKey(self.request_id, self.attempt)
        self.digest = digest_of(self.submitted)
        self.choices = tuple(TokenOrder(choice=i) for i in range(self.submitted.sampling.n))
        self.story = Story(self.key.request_id, self.ledger.submitted_s)
        self.story.note(Moment.SUBMITTED, self.ledger.submitted_s, (), submission(self.submitted))

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

    @property
    def told(self) -> int:
        """Tokens of all choices that were delivered."""
        return sum([len(choice.delivered) for choice in self.choices])

    @property
    def decoder(self) -> tuple[str, ...]:
        """The name of the decode worker of its latest placement."""
        return self.worker_names[-1:]

    def decodes_at(self, worker: Incarnation) -> bool:
        """This attempt's decode worker is that one."""
        return self.placed is not None and self.placed.candidate.decode.incarnation == worker

    def place(self, admitted: Admitted, now_s: float) -> None:
        self.placed = admitted
        self.placed_s = now_s
        self.prefill_worker = admitted.candidate.placement.prefill
        self.worker_names = admitted.candidate.names
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
        self.worker_names = candidate.names
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
        if (happened := LIFETIMES.get(moment.name)) is not None:
            by = self.worker_names[:1] if moment.name == "prefill_started" else self.decoder
            cause = found(moment.tokens, moment.source) if moment.tokens else ""
            self.story.note(happened, moment.at_s, by, cause)

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
