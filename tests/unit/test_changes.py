"""`Admin.Change`: what a router does itself, what it passes on, how a controller reads a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from cluster.cli.change import OnRay
from cluster.config.load import load_config, read_json
from cluster.config.overrides import Override
from cluster.core.changes import with_count
from cluster.core.plan import plan_cluster
from cluster.core.resolve import resolve
from cluster.on_ray import connect, door
from cluster.on_ray.asked import ApplyFile, Asked, Denied, Drain, Flip, Granted, Pending, Scale
from cluster.on_ray.door import Door, DoorAt, ToController
from cluster.process import admin
from kvrelay.access.values import Secrets
from kvrelay.errors import ConfigError, InvalidRequest, KvrelayError, PeerError
from kvrelay.types import Incarnation, Role
from kvrelay.v1.admin_pb2 import ChangeRequest, ChangeResponse
from kvrelay.v1.worker_pb2 import SetStateRequest, SetStateResponse
from router.grpc_api.changes import ChangeDenied, Changes, NobodyAnswers, OfProcesses
from router.live.link import WorkerLink
from tests.access import ACCESS
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_role_wishes import SITE, Cluster

SECRETS = Secrets(token=b"t" * 32, key=b"k" * 32)


def scale(count: int = 3) -> ChangeRequest:
    return ChangeRequest(scale={"pool": "decode", "count": count})


def drain(*, replace: bool) -> ChangeRequest:
    return ChangeRequest(drain={"name": "w", "replace": replace}, drain_s=7.0)


def flip(role: str) -> ChangeRequest:
    return ChangeRequest(flip={"name": "w", "role": role})


APPLY = ChangeRequest(apply={"config": "{}"})


def changed(changes: Changes, asked: ChangeRequest) -> ChangeResponse:
    return asyncio.run(changes.change(asked))


# --- a router without a controller ----------------------------------------------------------------


class Workers:
    """Of one name, which remembers what it was told."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.told: list[tuple[str, SetStateRequest]] = []
        self._fails = fails

    async def set_worker(self, name: str, wanted: SetStateRequest) -> SetStateResponse:
        if self._fails is not None:
            raise self._fails
        self.told.append((name, wanted))
        return SetStateResponse()


def own(workers: Workers) -> Changes:
    return OfProcesses(workers)  # type: ignore[arg-type]


def test_a_router_by_itself_tells_its_workers() -> None:
    workers = Workers()
    assert changed(own(workers), flip("prefill")) == ChangeResponse()
    assert changed(own(workers), drain(replace=True)) == ChangeResponse()
    assert workers.told == [
        ("w", SetStateRequest(role="prefill")),
        ("w", SetStateRequest(drain_s=7.0)),
    ]


@pytest.mark.parametrize(
    ("asked", "owner"),
    [
        (scale(), "whoever starts them says how many there are; of a Deployment, kubectl scale"),
        (drain(replace=False), "whoever starts them says how many there are"),
        (APPLY, "each reads the file when it starts"),
    ],
)
def test_a_router_by_itself_says_who_changes_the_rest(asked: ChangeRequest, owner: str) -> None:
    workers = Workers()
    with pytest.raises(ChangeDenied, match=f"have no controller: {owner}"):
        changed(own(workers), asked)
    assert not workers.told


def test_what_a_worker_can_not_be_is_denied() -> None:
    with pytest.raises(ChangeDenied, match="another dtype"):
        changed(own(Workers(PeerError("another dtype"))), flip("decode"))
    with pytest.raises(LookupError):
        changed(own(Workers(LookupError("no worker is named w"))), flip("decode"))
    with pytest.raises(InvalidRequest, match="nothing is wished"):
        changed(own(Workers()), ChangeRequest())


def test_a_worker_that_does_not_answer_is_not_one_that_refuses() -> None:
    """It may be asked again."""

    async def ask() -> None:
        link = WorkerLink("127.0.0.1:1", Incarnation("r"), NOBODY)
        try:
            await link.set_state(SetStateRequest(role="prefill"))
        finally:
            await link.close()

    with pytest.raises(LookupError, match=r"the worker at 127\.0\.0\.1:1 does not answer: "):
        asyncio.run(ask())


NOBODY: Any = None
"""Owns a link that never hears anything."""


# --- a router that has one ------------------------------------------------------------------------


class Controller:
    """`answer` to a wish, as its actor gives it."""

    def __init__(self, answer: Callable[[], Awaitable[Granted | Denied]]) -> None:
        self.heard: list[object] = []
        self._answer = answer
        self.wish = self

    def remote(self, wish: object) -> Awaitable[Granted | Denied]:
        self.heard.append(wish)
        return self._answer()


async def granted() -> Granted:
    return Granted(("a", "b"))


async def denied() -> Denied:
    return Denied("no pool of workers is named x")


async def dead() -> Granted:
    raise ActorDiedError


async def silent() -> Granted:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
def to_controller(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], tuple[Controller, Changes]]:
    def made(answer: Any) -> tuple[Controller, Changes]:
        controller = Controller(answer)
        known = {("c/controller", "ours"): controller}
        monkeypatch.setattr(ray, "get_actor", lambda *name: known[name])
        return controller, ToController("c/controller", "ours")

    return made


def test_the_controller_hears_each_wish(to_controller: Any) -> None:
    controller, changes = to_controller(granted)
    for asked in (scale(), drain(replace=False), flip("decode"), APPLY):
        assert list(changed(changes, asked).lines) == ["a", "b"]
    assert controller.heard == [
        Scale("decode", 3),
        Drain(name="w", replace=False),
        Flip("w", Role.DECODE),
        ApplyFile("{}"),
    ]


def test_what_the_controller_denies_is_told(to_controller: Any) -> None:
    with pytest.raises(ChangeDenied, match="no pool of workers is named x"):
        changed(to_controller(denied)[1], scale())


def test_what_nobody_can_read_is_not_passed_on(to_controller: Any) -> None:
    controller, changes = to_controller(granted)
    with pytest.raises(InvalidRequest, match="'cook', which is none of"):
        changed(changes, flip("cook"))
    with pytest.raises(InvalidRequest, match="nothing"):
        changed(changes, ChangeRequest())
    assert not controller.heard


def test_a_controller_that_does_not_answer_is_told(
    to_controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NobodyAnswers, match="c/controller does not answer"):
        changed(to_controller(dead)[1], scale())
    monkeypatch.setattr(door, "ANSWER_S", 0.01)
    with pytest.raises(NobodyAnswers, match="c/controller has not answered for 0"):
        changed(to_controller(silent)[1], scale())

    def unknown(*_: str) -> None:
        raise ValueError("no actor has this name")

    monkeypatch.setattr(ray, "get_actor", unknown)
    with pytest.raises(NobodyAnswers, match="c/controller does not answer"):
        changed(ToController("c/controller", "ours"), scale())


# --- the controller's own door --------------------------------------------------------------------


def at_door(asking: Callable[[DoorAt], Any], answer: Granted | Denied) -> tuple[list[Asked], Any]:
    """What the controller has heard, and what was told to one that asks at a real port."""
    heard: list[Asked] = []

    async def hear(wish: Asked) -> Granted | Denied:
        heard.append(wish)
        return answer

    async def run() -> Any:
        opened = Door(hear)
        at = await opened.at(PLAN)
        assert at == await opened.at(PLAN), "it opens once"
        try:
            return await asyncio.to_thread(asking, at)
        finally:
            await opened.close()

    return heard, asyncio.run(run())


PLAN = plan_cluster(resolve(load_config(None), SITE), SECRETS)


def test_a_command_on_ray_asks_the_controller_as_it_would_ask_a_router() -> None:
    def ask(at: DoorAt) -> tuple[str, ...]:
        return admin.change(scale(), at.address, at.access)

    assert at_door(ask, Granted(("a", "b"))) == ([Scale("decode", 3)], ("a", "b"))
    with pytest.raises(admin.NotPossible, match="no pool of workers is named x"):
        at_door(ask, Denied("no pool of workers is named x"))


def test_a_controller_that_dies_meanwhile_is_told() -> None:
    gone = SimpleNamespace(door=lambda: DoorAt("127.0.0.1:1", ACCESS))
    with pytest.raises(KvrelayError, match="has not answered, and may still do it"):
        OnRay(gone).change(scale={"pool": "decode", "count": 3})  # type: ignore[arg-type]


def test_the_door_hears_those_alone_who_have_the_token() -> None:
    def ask(at: DoorAt) -> None:
        with pytest.raises(ConfigError, match="the token is of another cluster"):
            admin.change(scale(), at.address, ACCESS)

    assert at_door(ask, Granted(())) == ([], None)


def test_no_number_is_too_large_for_the_controller() -> None:
    plan = plan_cluster(resolve(load_config(None), SITE))
    with pytest.raises(ConfigError, match="decode=1000000000000: expected 0 to 100000 workers"):
        with_count(plan, "decode", 10**12)


# --- a file, at the controller --------------------------------------------------------------------

FILES = sorted(REPOSITORY.glob("deploy/configs/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_travels_whole(file: Path) -> None:
    config = load_config(file)
    back = read_json(config.model_dump_json(exclude_unset=True))
    assert back == config
    assert [pool.model_fields_set for pool in back.workers] == [
        pool.model_fields_set for pool in config.workers
    ]


def heard(monkeypatch: pytest.MonkeyPatch, config: str) -> Granted | Denied:
    """By the controller of the default cluster, which has a token."""
    (answer,) = answered(monkeypatch, ApplyFile(config, only_tell=True))
    return answer


def answered(monkeypatch: pytest.MonkeyPatch, *asked: Asked) -> list[Granted | Denied]:
    monkeypatch.setattr(connect, "site_of", lambda *, own: SITE)
    running = load_config(None)
    plan = plan_cluster(resolve(running, SITE), SECRETS, given=running)

    async def run() -> list[Granted | Denied]:
        cluster = Cluster(plan)
        cluster.fleet.own = True
        return [await cluster.wishes.hear(wish) for wish in asked]

    return asyncio.run(run())


def test_what_is_not_yet_as_desired_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settled, _, growing = answered(monkeypatch, Pending(), Scale("decode", 2), Pending())
    assert settled == Granted(())
    assert isinstance(growing, Granted) and len(growing.lines) == 1
    assert growing.lines[0].startswith(("decode-1 ", "the cluster changes"))


def test_a_controller_plans_a_file_with_its_own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard(monkeypatch, load_config(None).model_dump_json(exclude_unset=True)) == Granted(())
    pools = [{"role": "prefill"}, {"role": "decode", "replicas": 2}]
    more = json.dumps({"workers": pools})
    assert heard(monkeypatch, more) == Granted(("decode: 1 -> 2 workers",))


def test_where_the_caller_keeps_the_token_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [Override(("network", "token_file"), "/home/me/token")])
    assert heard(monkeypatch, config.model_dump_json(exclude_unset=True)) == Granted(())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"workers": [{"role": "both"}], "pool": {"enabled": "off"}}', "pool.enabled: whether"),
        ('{"name": "x", "workers": [{"role": "both"}]}', "name: got x, and this router is of"),
        ('{"workers": [{"role": "cook"}]}', 'workers.0.role: got "cook", expected'),
        ('{"workerz": []}', "workerz: unknown key, did you mean workers?"),
        ("workers: []", "Invalid JSON"),
    ],
)
def test_a_file_that_can_not_be_is_denied(
    monkeypatch: pytest.MonkeyPatch, config: str, reason: str
) -> None:
    answer = heard(monkeypatch, config)
    assert isinstance(answer, Denied)
    assert reason in answer.reason and "\n" not in answer.reason
