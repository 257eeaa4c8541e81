"""Half of the workers that decode die for good, while half as many newcomers again arrive as the
cluster can serve: no admitted request fails, and none of its tier comes before it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from kvpool.core.transfer.messages import HandoffMode
from kvrelay.types import RequestSpec, Role
from router.core.faults.silence import PERIOD_S
from router.core.policy.choice import Policies
from tests.sim.clients import Clients
from tests.sim.model import PLAIN, TIERS
from tests.sim.seeds import seeds
from tests.sim.talks import LONGEST, make_talks
from tests.sim.waits import who_waits
from tests.sim.worker import Shape

ANSWER = 24
LOAD = 1.5


def make(seed: int, admission: str, routers: int) -> Clients:
    """Two prefill workers and four that decode."""
    names = [f"router-{i}" for i in range(routers)]
    policies = Policies(admission=admission)
    clients = Clients(seed, 0, HandoffMode.PUSH, policies, routers=names, tick_s=PERIOD_S)
    for i, role in enumerate([Role.PREFILL] * 2 + [Role.DECODE] * 4):
        shape = Shape(role=role, blocks=60, layout=PLAIN, max_model_len=LONGEST + ANSWER)
        clients.cluster.start_worker(f"{role}-{i}", shape)
    return clients


def requests(seed: int, number: int) -> list[RequestSpec]:
    """With an even seed all are of one tier."""
    rng = Random(seed)
    tiers = TIERS.tiers if seed % 2 else TIERS.tiers[-1:]
    specs = make_talks(rng, number, ANSWER)
    return [replace(one, qos_tier=rng.choice(tiers).name) for one in specs]


@cache
def seconds_each(seed: int, number: int = 60) -> float:
    """That the whole cluster takes for a request, with enough of them."""
    clients = make(seed, "none", 1)
    for spec in requests(seed, number):
        clients.add(spec, 0.1)
    assert clients.cluster.wait(lambda: clients.all_ended, 300.0), who_waits(clients.cluster)
    return clients.cluster.now_s / number


def overload(seed: int, admission: str, routers: int) -> Counter[str]:
    """Every request ends as it should; what happened on the way."""
    clients, each_s = make(seed, admission, routers), seconds_each(seed)
    cluster, number = clients.cluster, 120
    for spec in requests(seed, number):
        clients.add(spec, number * each_s / LOAD)
    victims = [one for one in cluster.workers.values() if one.shape.role is Role.DECODE][:2]

    def kill() -> None:
        for victim in victims:
            cluster.kill(victim.incarnation, for_good=True)

    cluster.at(number * each_s / LOAD / 2, kill)
    assert cluster.wait(lambda: clients.all_ended, 600.0), who_waits(cluster)
    cluster.run()
    assert clients.conclude() == {"done": number}
    found = Counter(refusals=sum(call.refusals for call in clients.calls.values()))
    for router in cluster.routers.values():
        found += router.counts
        stories = [router.core.state.stories_of(name) for name in clients.calls]
        found["displaced"] += sum("lost" in str(story.events) for told in stories for story in told)
    return found


@pytest.mark.parametrize("start", seeds(1, long=10))
@pytest.mark.parametrize("case", ["predictive", "none", "predictive at two routers"])
def test_no_admitted_request_fails(start: int, case: str) -> None:
    found: Counter[str] = Counter()
    for seed in (2 * start, 2 * start + 1):
        found += overload(seed, case.split()[0], routers=2 if "two" in case else 1)
    assert found["displaced"] > 5, found
