"""Requests that kill workers are found, and those beside them are not harmed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from kvrelay.counters import Counters
from kvrelay.messages import Abort, Generate, Released, Reserved, Tokens, ToWorker, WorkerEvent
from kvrelay.types import FinishReason, Incarnation, RequestKey, RequestSpec, Role
from router.core.core import RouterCore
from router.core.events import (
    Aborted,
    Command,
    Deliver,
    Event,
    Fail,
    Refuse,
    Send,
    Submitted,
    TimePassed,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.faults.poison import (
    ALONE_TOKENS,
    END_TOLD_S,
    LEAST_RETRIES,
    LEFT_S,
    RETRY_SHARE,
    TURN_S,
    Blame,
    Ending,
    Standing,
    SuspectRequests,
)
from router.core.policy.admission_baselines import Unlimited
from router.core.request import MAX_ATTEMPTS, MOST_DEATHS, RequestState
from router.core.router_state import RouterState
from tests.unit.router_kit import hello, request

W = [Incarnation(f"w{i}") for i in range(100)]


def key(name: str, attempt: int = 0) -> RequestKey:
    return RequestKey(name, attempt)


def step(*names: str, blame: Blame = Blame.STEP, complete: bool = True) -> Ending:
    return Ending(blame=blame, step=tuple(map(key, names)), complete=complete, why="it crashed")


# --- who is blamed --------------------------------------------------------------------------------


@dataclass
class Court:
    """Deaths of workers, one after another."""

    here: list[str]
    suspects: SuspectRequests = field(default_factory=SuspectRequests)
    deaths: int = 0

    def die(self, ending: Ending, *ran: str) -> tuple[list[str], str | None]:
        """(the new suspects, who is convicted); `ran` were at the worker."""
        worker = W[self.deaths]
        self.deaths += 1
        self.suspects.await_end(worker, map(key, ran or self.here), 0)
        judged = self.suspects.judge(worker, ending, self.here)
        if judged.convicted is not None:
            self.here.remove(judged.convicted)
        self.suspects.validate(self.here)
        assert {*judged.released}.isdisjoint(judged.suspects)
        return [*judged.suspects], judged.convicted


def test_the_second_death_alone_convicts_and_clears_the_others() -> None:
    court = Court([*"abcd"])
    assert court.die(step("a", "b", "c")) == (["a", "b", "c"], None)
    assert court.die(step("b")) == ([], "b")
    assert court.suspects.of(Standing.CLEARED) == ["a", "c"]
    assert (court.suspects.suspected, court.suspects.convicted) == (3, 1)


def test_a_death_beside_others_convicts_nobody() -> None:
    court = Court([*"abcd"])
    court.die(step("a", "b"))
    assert court.die(step("a", "c")) == (["a", "c"], None)
    assert court.die(step("a", complete=False)) == ([*"abcd"], None), "more were in that step"


def test_a_first_death_alone_convicts_nobody() -> None:
    court = Court(["a"])
    assert court.die(step("a")) == (["a"], None)
    assert court.die(step("a")) == ([], "a")


def test_who_is_killed_is_suspected_the_second_time() -> None:
    court = Court([*"abcd"])
    assert court.die(step("a", "b", blame=Blame.SHARED)) == ([], None)
    assert court.die(step("c", "d", blame=Blame.SHARED)) == ([], None)
    assert court.die(step("b", "d", blame=Blame.SHARED)) == (["b", "d"], None)
    assert court.die(step("b", blame=Blame.SHARED)) == ([], "b")


def test_who_has_yielded_tokens_since_it_was_killed_is_trusted() -> None:
    court = Court([*"ab"])
    court.die(step("a", "b", blame=Blame.SHARED))
    court.suspects.yielded("a", ALONE_TOKENS - 1)
    court.suspects.yielded("b", ALONE_TOKENS)
    assert court.die(step("a", "b", blame=Blame.SHARED)) == (["a"], None)


def test_a_suspect_that_is_killed_is_tried_again() -> None:
    court = Court([*"ab"])
    court.die(step("a", "b"))
    assert court.suspects.take_turns(2, 0, stuck=False) == ["a"]
    assert court.die(step("a", blame=Blame.SHARED)) == ([], None)
    assert court.suspects.standing("a") is Standing.TRIED


def test_nobody_else_is_blamed() -> None:
    """Another router's requests, those of another attempt, and what is not known."""
    court = Court([*"ab"])
    ending = replace(step("x", "a"), step=(key("x"), key("a", 7)))
    assert court.die(ending) == ([], None)
    assert court.die(step("a", "b", blame=Blame.NONE)) == ([], None)
    assert court.suspects.judge(W[50], step("a"), court.here).suspects == ()


def test_beside_another_routers_request_nobody_is_alone() -> None:
    court = Court([*"ab"])
    court.die(step("a", "b"))
    assert court.die(step("a", "theirs")) == (["a"], None)


def test_an_attempt_that_failed_just_before_its_worker_died_counts() -> None:
    court = Court([*"ab"])
    court.suspects.left(key("a"), (W[0], W[7]), 0)
    assert court.die(step("a", "b"), "b") == (["a", "b"], None)
    court.suspects.left(key("b", 1), (W[1],), 0)
    court.suspects.await_end(W[1], (), LEFT_S + 1)
    late = replace(step(), step=(key("b", 1),))
    assert court.suspects.judge(W[1], late, court.here).convicted is None


def test_suspects_take_turns_and_no_worker_for_one_holds_up_the_next_for_a_while() -> None:
    court = Court([*"abc"])
    court.die(step("a", "b", "c"))
    turns = court.suspects.take_turns
    assert turns(3, 0, stuck=False) == ["a"]
    assert turns(3, TURN_S + 1, stuck=False) == []
    assert turns(3, TURN_S - 0.1, stuck=True) == []
    assert turns(3, TURN_S, stuck=True) == ["b"]
    for name in "ab":
        assert court.suspects.yielded(name, ALONE_TOKENS)
    assert turns(3, TURN_S, stuck=False) == ["c"]


def test_those_that_are_cleared_come_back_a_few_at_a_time() -> None:
    names = [f"r{i}" for i in range(41)]
    court = Court(names)
    court.die(step(*names))
    (tried,) = court.suspects.take_turns(41, 0, stuck=False)
    assert court.die(step(tried)) == ([], tried)
    most = int(RETRY_SHARE * 40)
    first = court.suspects.take_turns(40, 0, stuck=False)
    assert len(first) == most and court.suspects.take_turns(40, 0, stuck=False) == []
    court.suspects.yielded(first[0], ALONE_TOKENS)
    court.suspects.forget(first[1])
    assert len(court.suspects.take_turns(40, 0, stuck=False)) == 2
    assert len(Court([*"abcdef"]).here) > LEAST_RETRIES, "also among few"


# --- in a router ----------------------------------------------------------------------------------


@dataclass
class Machine:
    """Yields a token of each of its requests in a step; those that run alone take turns with the
    others."""

    running: dict[str, RequestSpec] = field(default_factory=dict)
    yielded: dict[str, int] = field(default_factory=dict)
    was_alone: bool = False

    def step(self) -> list[str]:
        alone = [n for n, s in self.running.items() if self.yielded[n] < s.alone_tokens]
        self.was_alone = bool(alone) and (not self.was_alone or len(alone) == len(self.running))
        return alone[:1] if self.was_alone else [n for n in self.running if n not in alone]


@dataclass
class Cluster:
    """Workers of role both. `poison`: # request |-> the token at which it kills its worker;
    `silently`: by SIGKILL, as far as anybody can see. Every event is followed by `validate`."""

    random: Random
    core: RouterCore
    poison: dict[str, int] = field(default_factory=dict)
    silently: bool = False
    machines: dict[Incarnation, Machine] = field(default_factory=dict)
    now_s: float = 1.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    killed_by: list[str] = field(default_factory=list)
    endings: list[tuple[float, WorkerEnded]] = field(default_factory=list)
    lives: int = 0
    died_in: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(seed: int, workers: int, **options: object) -> Cluster:
        state = RouterState(admitting=Unlimited())
        made = Cluster(Random(seed), RouterCore(state), **options)  # type: ignore[arg-type]
        for _ in range(workers):
            made.join()
        return made

    def join(self) -> None:
        self.lives += 1
        worker = Incarnation(f"life-{self.lives}")
        self.machines[worker] = Machine()
        self.tell(WorkerJoined(hello=hello(worker, Role.BOTH, places=16, max_model_len=100)))

    def submit(self, name: str, tokens: int) -> None:
        self.tokens[name] = []
        self.tell(Submitted(request=request(name, max_tokens=tokens)))

    def die(self, worker: Incarnation, ran: list[str], blame: Blame) -> None:
        machine = self.machines.pop(worker)
        self.died_in.update(ran)
        keys = tuple(machine.running[name].key for name in ran)
        ending = Ending(blame=blame, step=keys, why="it crashed")
        told_s = self.now_s + self.random.choice((0.0, 0.01, 0.4))
        self.endings.append((told_s, WorkerEnded(incarnation=worker, ending=ending)))
        self.tell(WorkerLost(incarnation=worker, asked=True))

    def kill(self) -> None:
        """An ordinary SIGKILL."""
        worker = self.random.choice([*self.machines])
        self.die(worker, self.machines[worker].step(), Blame.SHARED)

    def turn(self) -> None:
        """A step of some worker, or time passes."""
        self.now_s += 0.01
        for told in [one for one in self.endings if one[0] <= self.now_s]:
            self.endings.remove(told)
            self.tell(told[1])
        if not self.machines or self.random.random() < 0.1:
            self.join() if len(self.machines) < 3 else self.tell(TimePassed())
            return
        worker = self.random.choice([*self.machines])
        self.run(worker, self.machines[worker])

    def run(self, worker: Incarnation, machine: Machine) -> None:
        ran = machine.step()
        at = {name: self.next_index(machine, name) for name in ran}
        deadly = [name for name in ran if at[name] >= self.poison.get(name, 1_000)]
        if deadly:
            self.killed_by += deadly[:1]
            self.die(worker, ran, Blame.SHARED if self.silently else Blame.STEP)
            return
        events: list[WorkerEvent] = []
        for name in ran:
            events += self.draw(machine, name, at[name])
        self.report(worker, *events)

    def next_index(self, machine: Machine, name: str) -> int:
        return len(machine.running[name].emitted_ids) + machine.yielded[name]

    def draw(self, machine: Machine, name: str, index: int) -> list[WorkerEvent]:
        spec = machine.running[name]
        machine.yielded[name] += 1
        is_last = index + 1 == spec.sampling.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        drawn = Tokens(
            key=spec.key,
            at_s=self.now_s,
            choice=0,
            first_index=index,
            token_ids=(index,),
            finish_reason=reason,
        )
        if not is_last:
            return [drawn]
        del machine.running[name]
        return [drawn, Released(key=spec.key, at_s=self.now_s)]

    def report(self, worker: Incarnation, *events: WorkerEvent) -> None:
        counters = Counters(running=len(self.machines[worker].running))
        self.tell(WorkerSaid(incarnation=worker, events=events, counters=counters))

    def tell(self, event: Event) -> None:
        commands = self.core.handle(event, self.now_s)
        self.core.validate()
        self.check_turns()
        for command in commands:
            self.execute(command)

    def check_turns(self) -> None:
        """What the isolation promises: one suspect at a time, and few of those that come back."""
        state = self.core.state
        at_worker = [one for one in state.requests.values() if one.alone and one.workers]
        assert len(at_worker) <= 1, "suspects run at the same time"
        returning = state.suspects.of(Standing.RETURNING)
        active = len(state.requests) + len(self.poison)
        assert len(returning) <= max(LEAST_RETRIES, RETRY_SHARE * active)

    def execute(self, command: Command) -> None:
        match command:
            case Send(worker=worker, message=message):
                self.hear(worker, message)
            case Deliver(request_id=name, tokens=tokens, done=done):
                self.tokens[name] += [token for one in tokens for token in one.token_ids]
                if done:
                    self.ended[name] = "done"
            case Fail(request_id=name, reason=reason):
                self.ended[name] = reason
            case Refuse(request_id=name):
                self.ended[name] = "refused"
            case _:
                pass

    def hear(self, worker: Incarnation, message: ToWorker) -> None:
        machine = self.machines.get(worker)
        if machine is None:
            return
        if isinstance(message, Generate):
            name = message.spec.key.request_id
            machine.running[name], machine.yielded[name] = message.spec, 0
            self.report(worker, Reserved(key=message.spec.key, at_s=self.now_s))
        elif isinstance(message, Abort):
            found = machine.running.get(message.key.request_id)
            if found is not None and found.key == message.key:
                del machine.running[message.key.request_id]
                self.report(worker, Released(key=message.key, at_s=self.now_s))

    def run_to_the_end(self) -> None:
        for _ in range(40_000):
            self.turn()
            if not self.core.state.requests:
                return
        raise AssertionError(f"{[*self.core.state.requests]} are still here")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("silently", [False, True])
def test_poison_kills_two_workers_and_harms_no_neighbour(seed: int, silently: bool) -> None:
    """Three where nobody can see that it is not out of memory. Ordinary kills convict nobody, but
    for one that was in the last steps of three workers: nobody can tell it from poison."""
    rng = Random(seed)
    lengths = {f"r{i}": rng.randint(1, 40) for i in range(rng.randint(1, 24))}
    poison = {name: rng.randrange(lengths[name]) for name in [*lengths][: rng.randint(0, 2)]}
    cluster = Cluster.of(seed, rng.randint(1, 3), poison=poison, silently=silently)
    for name, tokens in lengths.items():
        cluster.submit(name, tokens)
        for _ in range(rng.randrange(4)):
            cluster.turn()
    if not silently:
        for _ in range(rng.randrange(5)):
            for _ in range(rng.randrange(60)):
                cluster.turn()
            if cluster.machines:
                cluster.kill()
    cluster.run_to_the_end()
    taken = [name for name in lengths if cluster.ended[name] != "refused"]
    doomed = [n for n in taken if cluster.died_in[n] > 2 and cluster.ended[n] != "done"]
    bad = [name for name in taken if name in poison or name in doomed]
    assert {n: cluster.ended[n] for n in taken} == {
        name: "poison" if name in bad else "done" for name in taken
    }
    for name in {*taken}.difference(doomed):
        assert cluster.tokens[name] == [*range(poison.get(name, lengths[name]))]
    assert len(cluster.killed_by) <= (3 if silently else 2) * len(bad)
    assert cluster.core.state.suspects.convicted == len(bad)
    assert not cluster.core.state.suspects.cases


@pytest.mark.parametrize("seed", range(10))
def test_clients_that_leave_take_their_suspicion_along(seed: int) -> None:
    rng = Random(seed)
    cluster = Cluster.of(seed, 2, poison={"r0": 3})
    for i in range(12):
        cluster.submit(f"r{i}", 30)
    for _ in range(400):
        cluster.turn()
        if rng.random() < 0.05 and cluster.core.state.requests:
            name = rng.choice([*cluster.core.state.requests])
            cluster.tell(Aborted(request_id=name))
            cluster.ended[name] = "aborted"
    cluster.run_to_the_end()
    assert {*cluster.ended.values()} <= {"done", "aborted", "poison"}


def test_an_ordinary_kill_costs_no_time_once_it_is_known() -> None:
    """Once the witness has told, all are asked for elsewhere; without a word, after a while."""
    for told in (True, False):
        cluster = Cluster.of(1, 2)
        for i in range(6):
            cluster.submit(f"r{i}", 30)
        worker = next(one for one, machine in cluster.machines.items() if machine.running)
        displaced = [*cluster.machines[worker].running]
        cluster.die(worker, displaced, Blame.SHARED)
        requests = cluster.core.state.requests
        assert all(requests[name].state is RequestState.WAITING for name in displaced)
        ((_, ending),) = cluster.endings
        cluster.endings.clear()
        (other,) = cluster.machines
        cluster.now_s += 0.01
        cluster.report(other)
        assert all(requests[name].state is RequestState.WAITING for name in displaced)
        if told:
            cluster.tell(ending)
        else:
            cluster.now_s += END_TOLD_S
            cluster.tell(TimePassed())
        assert {*displaced} <= {*cluster.machines[other].running}


def test_newcomers_do_not_take_the_places_of_those_that_wait_for_the_word() -> None:
    cluster = Cluster.of(1, 2)
    for i in range(32):
        cluster.submit(f"r{i}", 30)
    worker = next(iter(cluster.machines))
    cluster.die(worker, [], Blame.SHARED)
    (other,) = cluster.machines
    ended = next(iter(cluster.machines[other].running))
    spec = cluster.machines[other].running.pop(ended)
    last = Tokens(
        key=spec.key,
        at_s=1,
        choice=0,
        first_index=0,
        token_ids=(0,),
        finish_reason=FinishReason.STOP,
    )
    cluster.report(other, last, Released(key=spec.key, at_s=1))
    cluster.submit("new", 30)
    assert "new" not in cluster.machines[other].running


def test_many_deaths_without_suspicion_cost_no_life() -> None:
    cluster = Cluster.of(1, 1)
    cluster.submit("r", 60)
    for _ in range(5 * MAX_ATTEMPTS):
        (worker,) = cluster.machines
        cluster.die(worker, [], Blame.NONE)
        cluster.join()
        cluster.now_s += END_TOLD_S
        cluster.tell(TimePassed())
        (machine,) = cluster.machines.values()
        assert [*machine.running] == ["r"]
        (worker,) = cluster.machines
        cluster.run(worker, machine)
    assert cluster.tokens["r"] == [*range(5 * MAX_ATTEMPTS)]


def test_who_gets_no_token_between_many_deaths_fails() -> None:
    """Whatever its workers died of, and whether that could be seen or not."""
    cluster = Cluster.of(1, 1)
    cluster.submit("r", 60)
    for death in range(MOST_DEATHS):
        assert not cluster.ended, f"after {death} deaths"
        (worker,) = cluster.machines
        del cluster.machines[worker]
        cluster.tell(WorkerLost(incarnation=worker))
        cluster.join()
        cluster.now_s += 1
        cluster.tell(TimePassed())
    assert cluster.ended == {"r": "worker_lost"}


def test_a_message_that_is_rejected_costs_a_life() -> None:
    """Its worker lives, so nothing would end it otherwise."""
    cluster = Cluster.of(1, 1)
    cluster.submit("r", 60)
    for _ in range(MAX_ATTEMPTS):
        (worker,) = cluster.machines
        del cluster.machines[worker]
        cluster.tell(WorkerLost(incarnation=worker, was_rejected=True))
        cluster.join()
    assert cluster.ended == {"r": "worker_lost"}


def test_the_story_says_what_happened() -> None:
    cluster = Cluster.of(1, 2, poison={"bad": 2})
    cluster.submit("bad", 20)
    cluster.submit("good", 20)
    cluster.run_to_the_end()
    (bad,) = cluster.core.state.stories_of("bad")
    told = [event.moment for event in bad.events]
    assert told.index("suspected") < told.index("runs alone") < told.index("failed")
    assert "it was in the last step of a worker" in str(bad.events)
    assert "this request kills workers" in bad.events[-1].reason
