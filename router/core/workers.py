"""The connected workers, what a router has booked at them, and why they can't serve. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf, isfinite
from typing import NamedTuple

from kvrelay.messages import WorkerHello
from kvrelay.types import TAKES_ALL, Incarnation, Role
from router.core.load.decode_outlook import Expected
from router.core.load.prefill_queue import Ahead
from router.core.policy.admission import Admitted
from router.core.policy.forecast import Forecast
from router.core.policy.placement import WorkerChoice, least_against
from router.core.promises.work import Promised
from router.core.state.candidate import PromptPrediction
from router.core.state.demand import Demand
from router.core.state.generation import ModelFacts
from router.core.state.quarantine import Objections, Pair
from router.core.state.worker_view import WorkerView

ALIKE = 1.0
"""Routers are taken to have so many sequences each, beside those that were seen."""
_ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)


class ByRole(NamedTuple):
    """`both` prefill and decode."""

    prefills: tuple[WorkerView, ...]
    decodes: tuple[WorkerView, ...]
    both: tuple[WorkerView, ...]


class Workers(dict[Incarnation, WorkerView]):
    """# incarnation |-> view of a connected worker. `decode_alone`: decode workers can do without
    prefill workers.

    Each worker has both schedulers. Once the last worker of a role is lost, the others serve as
    both, until one is back. `missing`: the roles that they stand in for."""

    def __init__(
        self,
        views: Mapping[Incarnation, WorkerView] | None = None,
        *,
        decode_alone: bool = False,
    ) -> None:
        super().__init__(views or {})
        self.decode_alone = decode_alone
        self.missing: frozenset[Role] = frozenset()
        self._seen: set[Role] = set()
        self._by_role: ByRole | None = None
        self._has_rules = False
        self._assign_roles()

    def __setitem__(self, worker: Incarnation, view: WorkerView) -> None:
        super().__setitem__(worker, view)
        self._assign_roles()

    def leave(self, worker: Incarnation) -> WorkerView | None:
        """Returns None for a worker that is not here."""
        view = self.pop(worker, None)
        self._assign_roles()
        return view

    def take_role(self, view: WorkerView, role: Role, epoch: int) -> None:
        """The worker has told another role than it had."""
        view.take_role(role, epoch)
        self._assign_roles()

    def _assign_roles(self) -> None:
        here = {view.own_role for view in self.values()}
        self._seen |= here - {Role.BOTH}
        self.missing = frozenset(self._seen - here)
        for view in self.values():
            view.serve_as(Role.BOTH if self.missing else view.own_role)
        self._by_role = None
        self._has_rules = any(view.hello.takes != TAKES_ALL for view in self.values())

    def by_role(self) -> ByRole:
        """Each in the order in which they joined."""
        if self._by_role is None:
            of = [tuple(v for v in self.values() if v.role is role) for role in _ROLES]
            self._by_role = ByRole(*of)
        return self._by_role

    @property
    def first(self) -> WorkerView | None:
        return next(iter(self.values()), None)

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that some pair of workers, or one worker alone, can hold; 0 where
        none can serve."""
        longest = dict.fromkeys(Role, 0)
        for view in self.values():
            longest[view.role] = max(longest[view.role], view.hello.max_model_len)
        decode = longest[Role.DECODE]
        pair = decode if self.decode_alone else min(longest[Role.PREFILL], decode)
        return max(longest[Role.BOTH], pair)

    @property
    def least_tokens(self) -> int:
        """The longest sequence that each worker can hold; 0 without any worker."""
        return min([view.hello.max_model_len for view in self.values()], default=0)

    @property
    def most_places(self) -> int:
        """The most slots of one worker that decodes; 0 without any."""
        hellos = [view.hello for view in self.values() if not view.prefills]
        return max((hello.max_running_requests for hello in hellos), default=0)

    @property
    def decode_places(self) -> int:
        """The slots of all workers that decode."""
        hellos = [view.hello for view in self.values() if not view.prefills]
        return sum(hello.max_running_requests for hello in hellos)

    def held(self, tier: str) -> int:
        """The tier's sequences at all workers that decode, also those of other routers."""
        decoding = (view for view in self.values() if not view.prefills)
        return sum(view.held(tier) for view in decoding)

    def model(self) -> ModelFacts | None:
        """The model that the first worker serves; None without any worker."""
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
        """Its incarnation, if it is not here (any more)."""
        view = self.get(worker)
        return view.hello.name if view is not None else worker

    def join(self, hello: WorkerHello) -> None:
        self[hello.incarnation] = WorkerView.of(hello)

    def choice(
        self,
        demand: Demand,
        tried: Collection[Incarnation],
        objections: Objections,
        forecast: Forecast,
    ) -> WorkerChoice:
        """The workers that could serve it, without decode workers that were `tried` and workers
        that drain. Those whose rule leaves its prompt to others only if there are no others."""
        prefills, decodes, both = [fitting(views, demand) for views in self.by_role()]
        if self._has_rules:
            prefills, both = _by_rules(demand, prefills, decodes, both)
        if demand.is_prompt_only:
            prefills, decodes, both = [], [], [*prefills, *both] or decodes
        return WorkerChoice(
            prefills=prefills,
            decodes=[view for view in decodes if view.incarnation not in tried],
            alone=[view for view in both if view.incarnation not in tried],
            objections=objections,
            forecast=forecast,
            workers=self,
            least_against=0 if both else least_against(prefills, decodes, objections),
        )

    def per_worker(self, promised: Promised) -> Promised:
        """The work, spread evenly over the workers of each role."""
        prefills, decodes, both = map(len, self.by_role())
        prefills, decodes = prefills + both, decodes + both
        return Promised(
            prefill_s=promised.prefill_s / max(1, prefills),
            sequences=promised.sequences / max(1, decodes),
            kv_tokens=promised.kv_tokens / max(1, decodes),
        )

    def all_by_own(self) -> float:
        """Sequences of all routers by those of this one, lately; before there are any, as if all
        were asked alike. Other routers are taken to have made promises in the same proportion. A
        router that few ask must not take its few promises for those of many."""
        _, decodes, both = self.by_role()
        decoding = (*decodes, *both)
        own = sum([view.own_usually for view in decoding])
        told = sum([view.all_usually for view in decoding])
        routers = max([1, *(view.counters.routers for view in decoding)])
        return min(routers, (told + routers * ALIKE) / (own + ALIKE))


def book_decode(demand: Demand, admitted: Admitted, now_s: float) -> None:
    """A slot at the decode worker; a prompt of which no token is wanted needs none."""
    if demand.is_prompt_only:
        return
    decode, prediction = admitted.candidate.decode, admitted.prediction
    joins_s = now_s + _known(prediction.decode.joins_in_s)
    step_s, gaps = _known(prediction.decode.step_s), max(1, demand.output_tokens - 1)
    expected = Expected(
        joins_s=joins_s,
        ends_s=joins_s + step_s * gaps,
        tokens=demand.mean_tokens,
        prompt_tokens=len(demand.spec.prompt_ids),
        most_tokens=demand.spec.sampling.max_tokens,
        choices=demand.choices,
        tpot_s=_kept_tpot_s(demand, decode),
        gaps=gaps,
        tier=demand.tier.name,
    )
    decode.outlook.add(demand.spec.key, expected)
    decode.peaks.add(step_s, now_s)
    if prediction.prompt.pause_s:
        decode.outlook.pauses.add(prediction.prompt.pause_s, now_s)


def book_prefill(
    demand: Demand, worker: WorkerView, prompt: PromptPrediction, now_s: float
) -> None:
    """An entry in the queue of the worker that prefills."""
    ahead = Ahead(
        seconds=prompt.pull_s + prompt.prefill_s,
        tokens=demand.prompt_tokens,
        priority=demand.priority,
        cached=demand.held.tokens(worker),
    )
    worker.queue.add(demand.spec.key, ahead, now_s)


def fitting(views: Iterable[WorkerView], demand: Demand) -> list[WorkerView]:
    """The workers that could serve it when idle, and that take requests. Suspects are among them
    only where there is no other."""
    choices, tokens = demand.choices, demand.longest_tokens
    could = [
        view
        for view in views
        if tokens <= view.hello.max_model_len
        and choices <= view.hello.max_running_requests
        and not view.draining
    ]
    return [view for view in could if not view.suspect] or could


def admitting(views: Iterable[WorkerView], demand: Demand) -> list[WorkerView]:
    """The workers whose rule admits its prompt."""
    return [view for view in views if demand.is_for(view)]


def _by_rules(
    demand: Demand,
    prefills: list[WorkerView],
    decodes: Collection[WorkerView],
    both: list[WorkerView],
) -> tuple[list[WorkerView], list[WorkerView]]:
    """The prefill workers and those of both roles whose rule admits it; all if those can't serve
    it."""
    chosen, alone = admitting(prefills, demand), admitting(both, demand)
    if alone or (chosen and (decodes or demand.is_prompt_only)):
        return chosen, alone
    return prefills, both


def _kept_tpot_s(demand: Demand, worker: WorkerView) -> float | None:
    """The objective that it asks for. None if the worker could not even keep it for this request
    alone: then no other request is refused for it."""
    tpot_s = demand.objectives.tpot_s
    if tpot_s is None:
        return None
    alone_s = worker.decode_s(demand.choices, demand.kv_tokens)
    return None if tpot_s < alone_s < inf else tpot_s


def _known(seconds: float) -> float:
    """A step that no measured time covers is booked as taking no time."""
    return seconds if isfinite(seconds) else 0.0


_QUARANTINED = "handoffs failed lately between all prefill and decode workers: they are quarantined"


def obstacle(workers: Workers, quarantined: Collection[Pair]) -> str | None:
    """Why no request can be served; None: some can."""
    if not workers:
        return "no worker has joined yet"
    if not workers.longest_tokens:
        return _missing(workers)
    prefills, decodes, alone = map(_taking, workers.by_role())
    if alone or (decodes and workers.decode_alone):
        return None
    if not prefills and not decodes:
        return "all workers drain"
    if not prefills or not decodes:
        return f"all {Role.PREFILL if decodes else Role.DECODE} workers drain"
    pairs = (Pair(p.incarnation, d.incarnation) for p in prefills for d in decodes)
    return _QUARANTINED if all(pair in quarantined for pair in pairs) else None


def _taking(views: Iterable[WorkerView]) -> list[WorkerView]:
    """Those that take requests."""
    return [view for view in views if not view.draining]


def _missing(workers: Workers) -> str:
    """No pair of them can serve."""
    here = {view.role for view in workers.values()}
    missing = [role for role in (Role.PREFILL, Role.DECODE) if role not in here]
    return f"no {' and no '.join(missing)} worker has joined yet"
