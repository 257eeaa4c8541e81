"""One request in the router: its state, its attempts, its tokens, where its time went. Pure.

    SEEKING --> ASKED --> (QUEUED) --> PREFILLING --> DECODING --> GONE
       ^          |           |            |             |
       |          '-----------'------------'-------------'  refused, failed or lost: SEEKING again
       |--> WAITING                                         aborted or failed for good: GONE
       '--> HELD    it may have killed a worker, and waits for its turn to run alone

`router.core.lifecycle` has one function for each transition.

The ledger keeps named moments; the gaps between them are the request's phases. Moments of workers
are put on the router's clock by their age when they arrive. So both ways of a message count to the
phase that waits for the answer. The phases up to `first_token_return` sum to the time to first
token, all of them to the whole time.

The tokens of a choice are delivered in index order, each once. The first token of an attempt comes
from another worker than the next ones, so these may overtake it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter

from kvrelay.messages import Lifetime, LifetimeMoment, PromptLogprobs, Tokens
from kvrelay.qos import QosTier
from kvrelay.types import Incarnation, Objectives, PromptLogprob, RequestKey, RequestSpec, Sampling
from router.core.faults.poison import ALONE_TOKENS
from router.core.policy.admission import Admitted
from router.core.promises.promises import Promise
from router.core.state.candidate import Candidate, Prediction
from router.core.state.demand import KeptChains
from router.core.state.generation import ChoiceTokens, GenerationRequest
from router.core.state.quarantine import Pair, Placement
from router.core.state.story import LIFETIMES, Moment, Story, found


class RequestState(StrEnum):
    """Where a request stands; there is always exactly one answer."""

    SEEKING = "seeking"  # the router looks for workers; no event ends in this state
    WAITING = "waiting"  # no worker can take it now; it is tried again
    HELD = "held"  # it may have killed a worker; it goes on when it is its turn
    ASKED = "asked"  # a decode worker was asked for a slot
    QUEUED = "queued"  # it has a slot; its prompt waits at the router for a prefill worker
    PREFILLING = "prefilling"  # it has a slot; its prompt was sent
    DECODING = "decoding"  # its first token has come
    GONE = "gone"  # it has ended, and the router has forgotten it


_IS = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _IS.SEEKING: frozenset({_IS.ASKED, _IS.WAITING, _IS.HELD, _IS.GONE}),
    _IS.HELD: frozenset({_IS.SEEKING, _IS.GONE}),
    _IS.WAITING: frozenset({_IS.SEEKING, _IS.GONE}),
    _IS.ASKED: frozenset({_IS.QUEUED, _IS.PREFILLING, _IS.SEEKING, _IS.GONE}),
    _IS.QUEUED: frozenset({_IS.PREFILLING, _IS.SEEKING, _IS.GONE}),
    _IS.PREFILLING: frozenset({_IS.DECODING, _IS.SEEKING, _IS.GONE}),
    _IS.DECODING: frozenset({_IS.PREFILLING, _IS.SEEKING, _IS.GONE}),  # PREFILLING: it moves
    _IS.GONE: frozenset(),
}
"""# state |-> the states that may follow it"""


# moment |-> the phase that ends with it
PHASES: dict[str, str] = {
    LifetimeMoment.PLACED: "place",
    LifetimeMoment.RESERVED: "reserve",
    LifetimeMoment.DISPATCHED: "router_queue",
    LifetimeMoment.PREFILL_RECEIVED: "dispatch",
    LifetimeMoment.PREFILL_STARTED: "prefill_queue",
    LifetimeMoment.FIRST_TOKEN: "prefill",
    LifetimeMoment.FIRST_TOKEN_RECEIVED: "first_token_return",
    LifetimeMoment.HANDOFF_COMMITTED: "handoff",
    LifetimeMoment.DECODE_JOINED: "decode_queue",
    LifetimeMoment.LAST_TOKEN: "decode",
    LifetimeMoment.LAST_TOKEN_RECEIVED: "last_token_return",
}


@dataclass(slots=True)
class Ledger:
    """`before_s`: the phases before submission, as the API measured them."""

    before_s: Mapping[str, float]
    submitted_s: float
    is_local: bool = False  # a decode worker computes the prompt beside the prefill workers
    _moments: dict[str, float] = field(default_factory=dict)

    def mark(self, moment: str, at_s: float) -> None:
        """The first time counts, but for `last_token*` the latest."""
        if moment in PHASES and (moment not in self._moments or moment.startswith("last_")):
            self._moments[moment] = at_s

    def age_s(self, now_s: float) -> float:
        """Since the API received it."""
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
        """The moments in their logical order. A batch that was read late has late moments: none
        may be later than those that follow it."""
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
        """Returns the tokens that can be delivered now."""
        if event.first_index <= len(self.delivered) and not self._early:
            return self._new(event)
        self._early[event.first_index] = event
        ready: list[ChoiceTokens] = []
        while due := [index for index in self._early if index <= self.next_index]:
            ready += self._new(self._early.pop(min(due)))
        return ready

    def begin_again(self) -> None:
        """Another attempt goes on behind the delivered tokens."""
        self._early.clear()
        self.resumed = self.next_index

    def _new(self, event: Tokens) -> list[ChoiceTokens]:
        """The event without the tokens that were delivered before."""
        skip = len(self.delivered) - event.first_index
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


def _digest_of(asked: GenerationRequest) -> int:
    """Of what a client that tries again sends again."""
    return hash((asked.tenant, asked.prompt_ids, asked.sampling.max_tokens, asked.sampling.n))


_is_finished = attrgetter("finished")
MAX_ATTEMPTS = 3
"""A request fails with its third attempt that fails. A worker's death is no failure of it."""
MOST_DEATHS = 8
"""It fails when so many workers in a row have died before it had one more token."""
FEWEST_TOKENS = 4
"""A request with fewer tokens says little about the time per token."""


@dataclass(slots=True, kw_only=True)
class Request:
    """`attempt` numbers this attempt: no two attempts of a router have the same number. `tried`:
    the decode workers that were asked in it. `avoided`: the pairs that failed in earlier ones."""

    submitted: GenerationRequest
    tier: QosTier
    ledger: Ledger
    attempt: int
    state: RequestState = RequestState.SEEKING
    tries: int = 1
    failures: int = 0  # of its attempts, but for deaths
    deaths: int = 0  # of workers, since its latest token
    alone: bool = False  # it may have killed a worker: no other request is in its steps
    placed: Admitted | None = None
    placed_s: float = 0.0
    reserved_s: float = 0.0  # when its decode worker had taken it
    tried: set[Incarnation] = field(default_factory=set)
    avoided: set[Pair] = field(default_factory=set)
    admitted: bool = False
    committed: bool = False  # this attempt's KV is at the decode worker
    predicted: Prediction | None = None  # when its first attempt was placed
    promise: Promise | None = None  # claimed by it, and neither kept nor broken yet
    early: Promise | None = None  # it was brought back before its time
    is_counted: bool = False  # as offered: once, however often it comes back
    capped_tokens: int | None = None  # its max_tokens were cut to that
    found_tokens: int | None = None  # in a cache, by the first prefill that began
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    moves: int = 0  # to other decode workers
    led_away: int = 0  # from workers that drain, while it decoded
    leaving: bool = False  # this attempt began so
    stood_back_s: float = 0.0  # while it was preempted after its first token
    prefill_worker: Incarnation | None = None  # has its prompt, or gets it once it has a slot
    worker_names: tuple[str, ...] = ()  # of its latest placement: who prefills, who decodes
    story: Story = field(init=False)
    request_id: str = field(init=False)
    objectives: Objectives = field(init=False)  # its own, else those of its tier
    digest: int = field(init=False)  # equal for requests that are alike
    key: RequestKey = field(init=False)
    chains: KeptChains = field(default_factory=dict)  # names of its blocks
    emitted_ids: tuple[int, ...] = ()  # delivered before this attempt, which goes on behind them
    resumed: tuple[tuple[int, ...], ...] = ()  # the same where these are not the prompt's
    choices: tuple[TokenOrder, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.submitted.request_id
        self.objectives = self.submitted.objectives.or_else(self.tier.objectives)
        self.key = RequestKey(self.request_id, self.attempt)
        self.digest = _digest_of(self.submitted)
        self.choices = tuple(TokenOrder(choice=i) for i in range(self.submitted.sampling.n))
        self.admitted = self.submitted.admitted
        if self.submitted.delivered:
            self._go_on()
        self.story = Story.begun(self.submitted, self.ledger.submitted_s)

    def _go_on(self) -> None:
        """Another router has delivered the first tokens."""
        for choice, token_ids in zip(self.choices, self.submitted.delivered, strict=True):
            choice.delivered += token_ids
            choice.finished = choice.choice in self.submitted.finished
        self.begin_attempt(self.attempt)

    def enter(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], (
            f"{self.key.request_id} (attempt {self.attempt}) can't go from {self.state} to {state}"
        )
        self.state = state

    @property
    def placement(self) -> Placement | None:
        return None if self.placed is None else self.placed.candidate.placement

    @property
    def pair(self) -> Pair | None:
        """None where one worker does all."""
        return None if self.placed is None else self.placed.candidate.pair

    def links(self) -> Iterator[Pair]:
        """The pairs of workers between which its KV travels."""
        if self.placed is None:
            return
        candidate = self.placed.candidate
        if candidate.source is not None and not candidate.source.is_pool_node:
            yield Pair(candidate.source.peer, candidate.prefiller.incarnation)
        if candidate.pair is not None:
            yield candidate.pair

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
            finished_choices=tuple([c.choice for c in self.choices if c.finished]),
            alone_tokens=ALONE_TOKENS if self.alone else 0,
        )

    @property
    def sampling(self) -> Sampling:
        asked, most = self.submitted.sampling, self.capped_tokens
        if self.prompt_logprobs and self.is_scored:
            asked = replace(asked, prompt_logprobs=None)
        return asked if most is None else replace(asked, max_tokens=most)

    @property
    def is_scored(self) -> bool:
        """The log probabilities of all tokens of its prompt but the first are known."""
        return len(self.prompt_logprobs) == len(self.submitted.prompt_ids) - 1

    def within_s(self, now_s: float) -> float | None:
        """Seconds until its first token is due; None: it has no such objective."""
        ttft_s = self.objectives.ttft_s
        return None if ttft_s is None else ttft_s - self.ledger.age_s(now_s)

    @property
    def cached_tokens(self) -> int:
        """Of its prompt alone: a later attempt may find emitted tokens too."""
        return min(self.found_tokens or 0, len(self.submitted.prompt_ids))

    @property
    def done(self) -> bool:
        return all(map(_is_finished, self.choices))

    def prediction_errors(self) -> dict[str, float]:
        """# ttft, tpot |-> predicted by actual seconds, as far as known; empty once it was run
        again"""
        if self.predicted is None or self.disturbed:
            return {}
        ledger, predicted, ratios = self.ledger, self.predicted, dict[str, float]()
        tokens = max(choice.next_index for choice in self.choices)
        first_s = ledger.after_s(LifetimeMoment.FIRST_TOKEN_RECEIVED)
        last_s = ledger.after_s(LifetimeMoment.LAST_TOKEN_RECEIVED)
        if first_s:
            ratios["ttft"] = predicted.ttft_s / (ledger.before_submission_s + first_s)
        if first_s and last_s and tokens > 1 and last_s > first_s:
            ratios["tpot"] = predicted.tpot_s * (tokens - 1) / (last_s - first_s)
        return ratios

    def take(self, event: Tokens) -> list[ChoiceTokens]:
        """Returns the tokens that can be delivered now."""
        self.stood_back_s = max(self.stood_back_s, event.stood_back_s)
        self.deaths = 0
        return self.choices[event.choice].take(event)

    def tpot_s(self, *, less_s: float = 0.0) -> float | None:
        """Of its longest choice, without `less_s` of its time; None if it had to be run again or
        is short."""
        tokens = max(choice.next_index for choice in self.choices)
        first_s = self.ledger.after_s(LifetimeMoment.FIRST_TOKEN_RECEIVED)
        last_s = self.ledger.after_s(LifetimeMoment.LAST_TOKEN_RECEIVED)
        if self.disturbed or tokens < FEWEST_TOKENS or first_s is None or last_s is None:
            return None
        return max(0.0, last_s - first_s - less_s) / (tokens - 1)

    @property
    def disturbed(self) -> bool:
        """It was run again or moved, so the time it took says nothing about the prediction."""
        went_on = self.tries > 1 or self.moves > 0 or self.led_away > 0
        return went_on or bool(self.submitted.delivered)

    @property
    def handed_over(self) -> bool:
        """The prefill worker has sent the KV and the first tokens, so it may die now. It samples
        no token for choices that had some before this attempt beside those of the prompt."""
        if not self.committed:
            return False
        for one in self.choices:
            samples = not (one.finished or (self.resumed and self.resumed[one.choice]))
            if samples and len(one.delivered) <= one.resumed:
                return False
        return True

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """The workers that this attempt still needs."""
        if self.placed is None:
            return ()
        decode = self.placed.candidate.decode.incarnation
        if self.prefill_worker is None or (self.committed and self.handed_over):
            return (decode,)
        return (decode, self.prefill_worker)

    @property
    def outcome(self) -> str:
        """What was delivered so far, in words."""
        tokens = sum([len(choice.delivered) for choice in self.choices])
        preempted = f", preempted for {self.stood_back_s:.3f} s" if self.stood_back_s else ""
        return f"{tokens} tokens{preempted}"

    def place(self, admitted: Admitted, now_s: float) -> None:
        """Its decode worker is asked now. `prefill_worker` stays None where it computes the prompt
        itself."""
        candidate = admitted.candidate
        self.placed = admitted
        self.placed_s = now_s
        self.prefill_worker = None if candidate.prefill is None else candidate.prefill.incarnation
        self.worker_names = candidate.names
        self.ledger.is_local = candidate.is_local
        if not self.disturbed:
            self.predicted = admitted.prediction
        self.tried.add(candidate.decode.incarnation)
        self.ledger.mark(LifetimeMoment.PLACED, now_s)

    def send_prompt_to(self, candidate: Candidate, now_s: float) -> None:
        """Its prompt has waited at the router; the prefill worker of `candidate` gets it."""
        assert self.placed is not None and candidate.prefill is not None
        self.placed = replace(self.placed, candidate=candidate)
        self.prefill_worker = candidate.prefill.incarnation
        self.worker_names = candidate.names
        self.ledger.mark(LifetimeMoment.DISPATCHED, now_s)

    def cap(self, max_tokens: int) -> None:
        if max_tokens < self.submitted.sampling.max_tokens:
            self.capped_tokens = max_tokens

    def on_lifetime(self, moment: Lifetime) -> None:
        """A worker says how far it has got."""
        self.committed |= moment.name == LifetimeMoment.HANDOFF_COMMITTED
        if moment.name == LifetimeMoment.PREFILL_STARTED and self.found_tokens is None:
            self.found_tokens = moment.tokens
        self.ledger.mark(moment.name, moment.at_s)
        if (happened := LIFETIMES.get(moment.name)) is not None:
            started = happened is Moment.PREFILL_STARTED
            by = self.worker_names[:1] if started else self.worker_names[-1:]
            cause = found(moment.tokens, moment.source) if moment.tokens else ""
            self.story.note(happened, moment.at_s, by, cause)

    def add_prompt_logprobs(self, event: PromptLogprobs) -> None:
        """Those that an earlier attempt has told are skipped."""
        known = 1 + len(self.prompt_logprobs) - event.first_position
        if known >= 0:
            self.prompt_logprobs += event.entries[known:]

    def is_spent(self, *, by_death: bool) -> bool:
        """Its attempt has failed. Returns whether it was the last one. It had no need to leave."""
        if self._fails_to_leave:
            return False
        if by_death:
            self.deaths += 1
            return self.deaths >= MOST_DEATHS
        self.failures += 1
        return self.failures >= MAX_ATTEMPTS

    @property
    def _fails_to_leave(self) -> bool:
        return self.leaving and not self.committed

    @property
    def new_tokens(self) -> int:
        """The most that one of its choices has yielded in this attempt."""
        return max(choice.next_index - choice.resumed for choice in self.choices)

    def try_again(self, attempt: int) -> None:
        """As `begin_attempt`, after a failure."""
        self.tries += not self._fails_to_leave
        self.begin_attempt(attempt)

    def begin_attempt(self, attempt: int) -> None:
        """Answers to the previous attempt are ignored from now on."""
        self._begin(attempt, self._delivered_prompt())

    def _delivered_prompt(self) -> tuple[int, ...]:
        """Each choice goes on behind its delivered tokens; where there is one choice, they count as
        part of the prompt."""
        return tuple(self.choices[0].delivered) if len(self.choices) == 1 else ()

    def next_spec(self, attempt: int) -> RequestSpec:
        """Of another attempt, if it began now."""
        emitted_ids = self._delivered_prompt()
        return replace(
            self.spec,
            key=RequestKey(self.request_id, attempt),
            emitted_ids=emitted_ids,
            resumed=self._resumed_behind(emitted_ids),
        )

    def move(self, spec: RequestSpec, *, led_away: bool = False) -> tuple[int, ...]:
        """It goes on as `spec` says, and behind the tokens that were delivered since: how many of
        each choice."""
        self.led_away += led_away
        self.moves += not led_away
        self._begin(spec.key.attempt, spec.emitted_ids)
        self.leaving, now = led_away, self.spec
        choices = range(spec.sampling.n)
        return tuple(
            max(0, len(now.resumed_by(one)) - len(spec.resumed_by(one))) for one in choices
        )

    def _begin(self, attempt: int, emitted_ids: tuple[int, ...]) -> None:
        self.attempt = attempt
        self.key = RequestKey(self.request_id, attempt)
        self.placed = None
        self.committed = self.leaving = False
        self.tried.clear()
        for choice in self.choices:
            choice.begin_again()
        self.emitted_ids, self.resumed = emitted_ids, self._resumed_behind(emitted_ids)

    def _resumed_behind(self, emitted_ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        first = len(emitted_ids)
        since = tuple(() if c.finished else tuple(c.delivered[first:]) for c in self.choices)
        return since if any(since) else ()
