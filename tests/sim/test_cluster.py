"""Random schedules of a whole cluster: every admitted request ends with its right tokens, once and
in order, or with a typed failure; nothing is left held, by a worker or in the router's books."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool.core.transfer.messages import HandoffMode
from kvrelay.types import Role
from tests.sim.calls import Call
from tests.sim.clients import Clients
from tests.sim.model import ROW_BYTES
from tests.sim.seeds import seeds
from tests.sim.worker import Shape

BLOCKS = 14


def start(clients: Clients, *, prefill: int = 0, decode: int = 0, both: int = 0) -> None:
    cluster = clients.cluster
    for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both)):
        for i in range(number):
            shape = Shape(
                role=role,
                blocks=clients.rng.choice([BLOCKS, 20, 40]),
                slabs=clients.rng.choice([1, 2]),
                slab_bytes=ROW_BYTES * clients.rng.choice([8, 64]),
                mode=clients.mode,
            )
            cluster.start_worker(f"{role}-{i}", shape)


def disturb(clients: Clients, moments: int) -> None:
    """At random moments kill or stop a worker, break a router's stream or the links of a worker."""
    cluster, rng = clients.cluster, clients.rng

    def strike() -> None:
        victims = sorted(cluster.workers)
        if not victims:
            return
        victim = rng.choice(victims)
        match rng.randrange(4):
            case 0:
                cluster.kill(victim)
            case 1:
                cluster.break_stream(victim)
            case 2:
                cluster.stop(victim)
                seconds = rng.choice([0.1, 1.0, 60.0])
                cluster.after(f"resume {victim}", lambda: cluster.resume(victim), seconds)
            case _:
                for peer in sorted(cluster.workers[victim].links):
                    cluster.cut(victim, peer)

    for i in range(moments):
        cluster.after(f"strike {i}", strike, rng.uniform(0.2, 4))


@pytest.mark.parametrize("seed", seeds(4, long=12))
@pytest.mark.parametrize(
    "shape",
    [
        {"prefill": 1, "decode": 1},
        {"prefill": 2, "decode": 2},
        {"prefill": 1, "decode": 1, "both": 1},
    ],
    ids=["1p1d", "2p2d", "1p1d1b"],
)
def test_undisturbed_every_request_is_done(seed: int, shape: dict[str, int]) -> None:
    clients = Clients(seed, requests=20)
    start(clients, **shape)
    assert clients.finish() == {"done": 20}


@pytest.mark.parametrize("seed", seeds(4, long=12))
def test_clients_that_leave_free_everything(seed: int) -> None:
    clients = Clients(seed, requests=20)
    start(clients, prefill=2, decode=2, both=1)
    for request_id in clients.calls:
        if clients.rng.random() < 0.6:
            clients.cluster.after(f"leave {request_id}", lambda r=request_id: clients.abort(r), 2.0)
    assert set(clients.finish()) <= {"done", "aborted"}


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(5, long=35))
def test_deaths_and_broken_links_lose_nothing(seed: int, mode: HandoffMode) -> None:
    clients = Clients(seed, requests=20, mode=mode)
    start(clients, prefill=2, decode=2, both=seed % 2)
    disturb(clients, moments=8)
    for request_id in clients.calls:
        if clients.rng.random() < 0.2:
            clients.cluster.after(f"leave {request_id}", lambda r=request_id: clients.abort(r), 2.0)
    assert set(clients.finish()) <= {"done", "aborted"}


def test_requests_survive_deaths() -> None:
    ends: Counter[str] = Counter()
    for seed in range(8):
        clients = Clients(seed, requests=20)
        start(clients, prefill=2, decode=2)
        disturb(clients, moments=3)
        ends += clients.finish()
    assert ends == {"done": 8 * 20}


@pytest.mark.parametrize("gone", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("seed", seeds(4, long=20))
def test_a_survivor_takes_the_missing_role(seed: int, gone: Role) -> None:
    """A prefill and a decode worker: once the router knows both, one is killed at any moment and
    never comes back."""
    clients = Clients(seed, requests=20)
    cluster = clients.cluster
    for role in (Role.PREFILL, Role.DECODE):
        cluster.start_worker(role, Shape(role=role, blocks=40, mode=clients.mode))

    def kill() -> None:
        (victim,) = (one.incarnation for one in cluster.workers.values() if one.shape.role is gone)
        if any(len(one.core.state.workers) < 2 for one in cluster.routers.values()):
            cluster.after("kill", kill, 0.1)
        else:
            cluster.kill(victim, for_good=True)

    cluster.after("kill", kill, clients.rng.uniform(0.1, 2))
    assert clients.finish() == {"done": 20}


def test_an_id_that_comes_again_at_once_is_another_request() -> None:
    """Its first life may still be on a worker's device."""
    for seed in range(10):
        clients = Clients(seed, requests=4)
        start(clients, prefill=1, decode=1)
        cluster = clients.cluster

        def again(request_id: str, clients: Clients = clients) -> None:
            call = clients.calls[request_id]
            face = call.face
            if face is not None and face.runs:
                clients.abort(request_id)
                face.hang_up()
                clients.calls[request_id] = Call(spec=call.spec, cut={})
                clients.submit(request_id, 1e-6)

        for moment in range(12):
            request_id = clients.rng.choice(list(clients.calls))
            cluster.after(f"again {moment}", lambda r=request_id, a=again: a(r), 1.0)
        assert clients.finish() == {"done": 4}
