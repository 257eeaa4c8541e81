"""Random schedules of all that a cluster may do at once: the default admission with objectives and
tiers, prefixes from peers, steps launched ahead, and moves of decoding requests. Whatever fails in
between, every request ends with its right tokens, or typed, and nothing is left held."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvpool.core.transfer.messages import HandoffMode
from kvrelay.qos import ONE_TIER
from kvrelay.types import NO_OBJECTIVES, Objectives, Role
from router.core.policy.choice import Policies
from tests.sim.clients import Clients
from tests.sim.model import PLAIN, TIERS
from tests.sim.seeds import seeds
from tests.sim.talks import LONGEST, make_talks
from tests.sim.test_cluster import disturb
from tests.sim.worker import Shape

OBJECTIVES = (
    NO_OBJECTIVES,
    Objectives(ttft_s=0.5),
    Objectives(ttft_s=2.0, tpot_s=0.05),
    Objectives(ttft_s=5.0, tpot_s=0.2),
)
LONG_ANSWER = 60


def make_clients(
    seed: int,
    *,
    mode: HandoffMode = HandoffMode.PUSH,
    policies: Policies | None = None,
    roles: tuple[Role, ...] = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    has_tiers: bool | None = None,
    decode_blocks: tuple[int, ...] = (24, 40, 60),
    longest_answer: int = 24,
    has_objectives: bool = False,
    requests: int = 24,
) -> Clients:
    """As the seed has it, where nothing is said."""
    rng = random.Random(f"defaults {seed} {mode}")
    if policies is None:
        policies = Policies(
            move_hot_spots=rng.random() < 0.7,
            local_prefill=rng.random() < 0.3,
            shared_queue=rng.random() < 0.3,
        )
    has_tiers = rng.random() < 0.4 if has_tiers is None else has_tiers
    clients = Clients(seed, 0, mode, policies)
    for i, role in enumerate(roles):
        shape = Shape(
            role=role,
            blocks=rng.choice((30, 40) if role is Role.PREFILL else decode_blocks),
            slabs=rng.choice([1, 2, 4]),
            layout=PLAIN,
            mode=mode,
            max_model_len=LONGEST + longest_answer,
            launches_ahead=rng.random() < 0.7,
            prompt_steps=1 + (random.Random(f"chunks {seed} {i}").random() < 0.6),
            qos=TIERS if has_tiers else ONE_TIER,
        )
        clients.cluster.start_worker(f"{role}-{i}", shape)
    for spec in make_talks(rng, requests, longest_answer, stop_share=0.5):
        objectives = rng.choice(OBJECTIVES) if has_objectives else NO_OBJECTIVES
        tier = rng.choice(TIERS.tiers).name if has_tiers else ""
        clients.add(replace(spec, qos_tier=tier), 2.0, objectives)
    return clients


def done(clients: Clients) -> Counter[str]:
    """What happened, those of dead workers left out."""
    found: Counter[str] = Counter(moved=sum(clients.cluster.core.state.moves.moved.values()))
    for worker in clients.cluster.workers.values():
        assert worker.core.lookup.peers is not None
        found.update(pulled_tokens=worker.core.lookup.peers.tokens)
        found.update(overlapped_steps=worker.device.overlapped_steps)
    return found


@pytest.mark.parametrize("mode", [HandoffMode.PUSH, HandoffMode.PULL])
@pytest.mark.parametrize("seed", seeds(3, long=40))
def test_undisturbed_every_request_is_done(seed: int, mode: HandoffMode) -> None:
    clients = make_clients(seed, mode=mode)
    assert clients.finish() == {"done": len(clients.calls)}


@pytest.mark.parametrize("mode", [HandoffMode.PUSH, HandoffMode.PULL])
@pytest.mark.parametrize("seed", seeds(5, long=60))
def test_deaths_broken_links_and_clients_that_leave(seed: int, mode: HandoffMode) -> None:
    clients = make_clients(seed, mode=mode, has_objectives=True)
    disturb(clients, moments=6)
    for request_id in clients.calls:
        if clients.rng.random() < 0.2:
            clients.cluster.after(f"leave {request_id}", lambda r=request_id: clients.abort(r), 2.0)
    ends = {end.split(":")[0] for end in clients.finish()}
    assert ends <= {"done", "aborted", "refused"}, ends


def test_prefixes_come_from_peers() -> None:
    found: Counter[str] = Counter()
    for seed in range(4):
        clients = make_clients(seed)
        assert clients.finish() == {"done": len(clients.calls)}
        found += done(clients)
    assert found["pulled_tokens"] > 50, found


def test_steps_are_launched_ahead_and_change_no_token() -> None:
    found: Counter[str] = Counter()
    for seed in range(4):
        clients = make_clients(seed, has_tiers=False)
        assert clients.finish() == {"done": len(clients.calls)}
        found += done(clients)
    assert found["overlapped_steps"] > 50, found


def test_requests_move_from_hot_spots_and_go_on_where_they_were() -> None:
    found: Counter[str] = Counter()
    for seed in range(4):
        clients = make_clients(
            seed,
            policies=Policies(move_hot_spots=True, admission="none"),
            decode_blocks=(28, 80),
            longest_answer=LONG_ANSWER,
        )
        assert clients.finish() == {"done": len(clients.calls)}
        found += done(clients)
    assert found["moved"] > 3, found
