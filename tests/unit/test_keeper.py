"""The keeper goes by what routers reported last: what is old takes nobody away, and adds some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from cluster.core.elastic.fleet import STARTS, Busy, Counts
from cluster.core.elastic.offered_sums import STALE_S, OfferedSums
from cluster.core.elastic.rules import Bounds, ElasticRules, RoleRules, SizedPool
from cluster.core.elastic.starts import GIVEN_UP_S, Settling
from cluster.elastic.heard import told_by
from cluster.elastic.keeper import Keeper
from cluster.watch.latest import Heard
from kvrelay.codec import MessageCodec
from kvrelay.types import Role
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import inference_pb2
from kvrelay.wire import encode_hello
from router.core.load.offered import OfferedWork
from tests.unit.router_kit import STEP_TIMES, hello
from tests.unit.test_elastic import rate

P, D = Role.PREFILL, Role.DECODE
TIMES = replace(
    STEP_TIMES,
    prefill_overhead_s=0.002,
    prefill_token_s=1e-4,
    prefill_pair_s=0.0,
    prefill_sequence_s=0.0,
    decode_knots=((1, 0.010), (100, 0.020)),
    decode_kv_token_s=1e-7,
)
PROMPTS = rate(10, 2000, 1, ttft_s=20.0)
"""Two prefill workers are busy all the time with these, and more are needed."""
SIZED = ElasticRules(
    roles=RoleRules(),
    flexible=frozenset(),
    sized={
        P: SizedPool("prefill", Bounds(least=1, most=4)),
        D: SizedPool("decode", Bounds(least=1, most=4)),
    },
    cooldown_s=30.0,
    start_s=1.0,
)
FLEXIBLE = replace(SIZED, flexible=frozenset({"w"}), sized={})


@dataclass
class Owning:
    """Implements Owner; what is told of workers follows what is asked at once."""

    of: ElasticRules
    roles: dict[str, Role] = field(default_factory=dict)
    starting: dict[str, Role] = field(default_factory=dict)
    resized: list[tuple[Counts, tuple[str, ...]]] = field(default_factory=list)
    flips: list[str] = field(default_factory=list)

    def rules(self, names: Sequence[str]) -> ElasticRules:
        return self.of

    def expected(self) -> Mapping[str, Role]:
        return self.roles | self.starting

    def change(self, name: str, role: Role) -> None:
        self.roles[name] = role
        self.flips.append(name)

    def resize(self, more: Counts, leaving: Sequence[str]) -> None:
        self.resized.append((more, tuple(leaving)))
        for name in leaving:
            self.roles.pop(name, None)
            self.starting.pop(name, None)
        for role, count in ((P, more.prefill), (D, more.decode)):
            for number in range(count):
                self.starting[f"{role}-new{len(self.resized)}{number}"] = role


def watched(
    name: str,
    role: Role,
    *,
    ago_s: float | None = 0.3,
    state: pb.WorkerState = pb.WORKER_STATE_READY,
) -> pb.WatchedWorker:
    told = replace(hello(name, role, places=100), step_times=TIMES, total_blocks=50_000)
    told = replace(told, prefill_chunk_tokens=2048)
    info = inference_pb2.WorkerInfo(name=name, incarnation=f"{name}'s", role=role)
    return pb.WatchedWorker(info=info, heard_ago_s=ago_s, state=state, hello=encode_hello(told))


_OFFERED = MessageCodec(OfferedWork, pb.OfferedWork, "a test")


def report(
    workers: Sequence[pb.WatchedWorker],
    sums: OfferedWork | None = None,
    cut: Sequence[tuple[str, str]] = (),
) -> pb.WatchReport:
    tiers = [pb.WatchedTier(name="default", offered=_OFFERED.encode(sums or OfferedWork()))]
    pairs = [inference_pb2.QuarantinedPair(prefill=p, decode=d) for p, d in cut]
    return pb.WatchReport(workers=workers, tiers=tiers, quarantined=pairs)


def heard(
    told: pb.WatchReport | None, heard_s: float, address: str = "one", trouble: str = ""
) -> Heard:
    return Heard(address=address, report=told, heard_s=heard_s, trouble=trouble)


class Never:
    """Implements Reports."""

    def of(self, routers: Sequence[str]) -> Sequence[Heard]:
        raise AssertionError(routers)

    def close(self) -> None:
        raise AssertionError


class Cluster:
    """Two routers, each of which is offered half of the work. The second may fall silent."""

    def __init__(self, rules: ElasticRules, roles: dict[str, Role]) -> None:
        self.owner = Owning(rules, dict(roles))
        self.keeper = Keeper(routers=lambda: (), owner=self.owner, reports=Never())
        self.now_s, self.sums = 100.0, OfferedWork()
        self.silent_s: float | None = None
        self.of_worker: dict[str, dict[str, object]] = {}
        self.cut: tuple[tuple[str, str], ...] = ()
        self.last: Heard | None = None
        self.not_heard_yet: dict[str, Role] = {}  # routers tell of them though they leave

    def seconds(self, count: int, work: OfferedWork) -> None:
        for _ in range(count):
            self.now_s += 1
            self.sums = self.sums + work.scaled(0.5)
            self.keeper.look([self._told("one"), self._second()], self.now_s)

    def starts(self) -> None:
        """All those that are starting serve."""
        self.owner.roles |= self.owner.starting
        self.owner.starting.clear()

    def _second(self) -> Heard:
        if self.silent_s is None or self.last is None:
            self.last = self._told("two")
        return self.last

    def _told(self, address: str) -> Heard:
        workers = [
            watched(name, role, **self.of_worker.get(name, {}))  # type: ignore[arg-type]
            for name, role in (self.owner.roles | self.not_heard_yet).items()
        ]
        return heard(report(workers, self.sums, self.cut), self.now_s, address)


def four(decode: int = 3) -> Cluster:
    """Of a pool whose workers take either role; too few prefill."""
    return Cluster(FLEXIBLE, {f"w-{n}": D if n < decode else P for n in range(4)})


def test_a_worker_of_another_pool_that_starts_again_is_not_one_too_many() -> None:
    rules = replace(SIZED, sized={D: SizedPool("decode", Bounds(least=1, most=4))})
    owner = Owning(rules, starting={"prefill-0": P, "decode-1": D})
    keeper = Keeper(routers=lambda: (), owner=owner, reports=Never())
    assert keeper._starting([], rules) == [Busy(name="decode-1", role=D, work=STARTS)]


# --- what is old ----------------------------------------------------------------------------------


def test_roles_follow_what_both_routers_tell() -> None:
    cluster = four()
    cluster.seconds(30, PROMPTS)
    assert cluster.owner.flips


def test_nobody_flips_while_a_router_is_silent_and_then_somebody_does() -> None:
    cluster = four()
    cluster.seconds(2, PROMPTS.scaled(0.1))
    cluster.silent_s = cluster.now_s
    cluster.seconds(int(STALE_S), PROMPTS.scaled(0.1))
    cluster.seconds(60, PROMPTS.scaled(3))
    assert not cluster.owner.flips
    cluster.silent_s = None
    cluster.seconds(30, PROMPTS)
    assert cluster.owner.flips


@pytest.mark.parametrize(
    "told", [{"ago_s": STALE_S + 1}, {"state": pb.WORKER_STATE_SILENT, "ago_s": 1.0}]
)
def test_nobody_flips_while_a_worker_is_silent(told: dict[str, object]) -> None:
    cluster = four()
    cluster.of_worker = {"w-0": told}
    cluster.seconds(60, PROMPTS)
    assert not cluster.owner.flips
    cluster.of_worker = {}
    cluster.seconds(30, PROMPTS)
    assert cluster.owner.flips


def test_nobody_flips_while_a_worker_can_hand_over_to_nobody() -> None:
    cluster = four(decode=2)
    cluster.cut = (("w-3", "w-0"), ("w-3", "w-1"))
    cluster.seconds(60, PROMPTS.scaled(1.3))
    assert not cluster.owner.flips
    cluster.cut = (("w-3", "w-0"),)
    cluster.seconds(30, PROMPTS.scaled(1.3))
    assert cluster.owner.flips


def sized(prefill: int, decode: int) -> Cluster:
    roles = {f"prefill-{n}": P for n in range(prefill)} | {f"decode-{n}": D for n in range(decode)}
    return Cluster(SIZED, roles)


def test_workers_come_while_a_router_is_silent_and_none_leaves() -> None:
    cluster = sized(1, 3)
    cluster.seconds(10, PROMPTS.scaled(0.1))
    cluster.silent_s = cluster.now_s
    cluster.seconds(30, PROMPTS.scaled(2))
    assert [leaving for _, leaving in cluster.owner.resized] == [()]
    (more, _) = cluster.owner.resized[0]
    assert more.prefill >= 1 and more.decode == 0
    cluster.starts()
    cluster.seconds(90, OfferedWork())
    assert len(cluster.owner.resized) == 1, "two decode workers too many stay"
    cluster.silent_s = None
    cluster.seconds(90, OfferedWork())
    assert cluster.owner.resized[-1][1]


def test_what_a_silent_router_was_offered_does_not_look_like_nothing_afterwards() -> None:
    """The same work all the time, half of it by a router that is silent for long."""
    work = PROMPTS.scaled(1.5)
    cluster = sized(4, 1)
    cluster.seconds(60, work)
    assert not cluster.owner.resized
    cluster.silent_s = cluster.now_s
    cluster.seconds(3 * int(SIZED.cooldown_s), work)
    cluster.silent_s = None
    cluster.seconds(90, work)
    assert not cluster.owner.resized


def test_a_silent_worker_is_no_capacity_but_one_that_its_owner_starts_again() -> None:
    cluster = sized(2, 1)
    cluster.seconds(20, PROMPTS.scaled(0.7))
    assert not cluster.owner.resized
    cluster.of_worker = {"prefill-1": {"ago_s": STALE_S + 1}}
    cluster.seconds(60, PROMPTS.scaled(0.7))
    assert not cluster.owner.resized, "it is expected back"
    del cluster.owner.roles["prefill-1"]
    cluster.seconds(10, PROMPTS.scaled(0.7))
    assert cluster.owner.resized[0][0] == Counts(1, 0)


def test_before_any_report_nothing_is_decided() -> None:
    keeper = Keeper(routers=lambda: (), owner=Owning(SIZED), reports=Never())
    assert keeper.look([heard(None, 1.0)], 2.0) == []


def test_a_silent_router_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    old = heard(report([watched("w-0", P)]), -100.0, "h:1", "no router answers: refused")

    class Old(Never):
        def of(self, routers: Sequence[str]) -> Sequence[Heard]:
            return [old]

    keeper = Keeper(routers=lambda: (), owner=Owning(FLEXIBLE), reports=Old())
    assert [keeper.turn(), keeper.turn()] == [[], []]
    (line,) = caplog.messages
    assert "until all routers are heard: h:1: no router answers: refused" in line


def test_each_worker_is_as_the_router_told_that_heard_it_last() -> None:
    here, there = [watched("w-0", P, ago_s=4.0)], [watched("w-0", D, ago_s=0.1)]
    told = told_by([heard(report(here), 10.0), heard(report(there), 9.0, "two")], 10.0)
    assert [one.info.role for one in told.workers] == [D] and not told.unheard
    old = told_by([heard(report(here), 10.0), heard(report(there), 4.0, "two")], 10.0)
    assert [one.info.role for one in old.workers] == [P] and old.unheard == ("two",)


def test_workers_that_drain_are_gone_and_one_that_has_told_nothing_yet_serves() -> None:
    workers = [
        watched("w-0", P, ago_s=None),
        watched("w-1", P, state=pb.WORKER_STATE_DRAINING, ago_s=90.0),
        watched("w-2", D, state=pb.WORKER_STATE_QUARANTINED),
    ]
    told = told_by([heard(report(workers), 10.0)], 10.5)
    assert [one.info.name for one in told.workers] == ["w-0", "w-2"] and not told.unheard


# --- additions before removals --------------------------------------------------------------------


def test_workers_are_added_first_and_removed_when_none_starts() -> None:
    """Prompts come instead of answers."""
    cluster = sized(1, 3)
    cluster.seconds(60, rate(10, 10, 500))
    before = len(cluster.owner.resized)
    cluster.seconds(90, PROMPTS)
    first = cluster.owner.resized[before:]
    assert all(more.prefill >= 1 and not leaving for more, leaving in first), first
    assert set(cluster.owner.starting.values()) == {P}
    cluster.starts()
    cluster.seconds(3, PROMPTS)
    more, leaving = cluster.owner.resized[-1]
    assert more == Counts(0, 0) and {name.partition("-")[0] for name in leaving} == {"decode"}


def test_a_worker_that_leaves_is_not_counted_until_routers_hear_of_it() -> None:
    cluster = sized(1, 4)
    there = dict(cluster.owner.roles)
    while len(cluster.owner.roles) == len(there):
        cluster.seconds(1, rate(10, 10, 1))
    left, cluster.not_heard_yet = dict(cluster.owner.roles), there
    told = len(cluster.owner.resized)
    cluster.seconds(5, rate(10, 10, 1))
    assert cluster.owner.resized[told:] == [] and cluster.owner.roles == left


def test_those_that_start_may_leave_before_others() -> None:
    cluster = sized(1, 1)
    cluster.seconds(20, PROMPTS)
    starting = set(cluster.owner.starting)
    assert starting
    before = len(cluster.owner.resized)
    cluster.seconds(120, OfferedWork())
    left = {name for _, leaving in cluster.owner.resized[before:] for name in leaving}
    assert left == starting and set(cluster.owner.roles) == {"prefill-0", "decode-0"}


# --- sums and settling ----------------------------------------------------------------------------


def test_only_what_came_while_a_router_was_heard_is_offered() -> None:
    sums, one = OfferedSums(), rate(1, 10, 1)
    sums.hear("late", one.scaled(1000), 10.0)
    assert sums.total.requests == 0, "its history is no burst"
    sums.hear("late", one.scaled(1003), 11.0)
    sums.hear("late", one.scaled(1003), 11.0)
    assert sums.total.requests == 3
    sums.hear("late", one.scaled(2), 12.0)
    assert sums.total.requests == 5, "it began anew"
    sums.hear("late", one.scaled(500), 12.0 + STALE_S + 1)
    assert sums.total.requests == 5
    sums.hear("late", one.scaled(501), 13.0 + STALE_S + 1)
    sums.hear("other", one.scaled(7), 20.0)
    sums.hear("other", one.scaled(8), 21.0)
    assert sums.total.requests == 7


def test_a_change_has_settled_when_every_router_tells_it() -> None:
    settling = Settling()
    for number in range(10):
        settling.asked(f"w-{number}", P, 0.0)
    assert settling.p90_s == 0.0
    settling.hear({"w-0": [P, D]}, 0.5)
    assert settling.p90_s == 0.0
    settling.hear({"w-0": [P, D], "w-1": [P, P]}, 1.0)
    assert settling.p90_s == 1.0
    settling.hear({"w-0": [P, P]} | {f"w-{n}": [P] for n in range(2, 9)}, 2.0)
    assert settling.p90_s == 2.0
    settling.hear({"w-9": [D]}, GIVEN_UP_S + 1)
    settling.hear({"w-9": [P]}, GIVEN_UP_S + 2)
    assert settling.p90_s == 2.0, "one that was given up tells nothing"


def test_a_fleet_that_settles_slowly_rests_longer() -> None:
    """Ten times as long as nine of ten changes took: here ninety seconds."""
    cluster = four()
    for number in range(3):
        cluster.keeper._settling.asked(f"other-{number}", P, 91.0)
    cluster.keeper._settling.hear({f"other-{n}": [P] for n in range(3)}, 100.0)
    cluster.seconds(30, PROMPTS)
    first = len(cluster.owner.flips)
    assert first
    cluster.seconds(55, rate(40, 10, 1000, tpot_s=None))
    assert len(cluster.owner.flips) == first
    cluster.seconds(40, rate(40, 10, 1000, tpot_s=None))
    assert len(cluster.owner.flips) > first
