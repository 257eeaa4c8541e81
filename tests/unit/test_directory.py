"""The directory against a naive one, and what the router makes of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvpool.core.blocks.block_news import BlockNews
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.hashes import BlockHash
from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, Counters, PoolUpdate, Prefill, PrefixSource
from kvrelay.types import Incarnation, Role, Tier
from router.core.core import RouterCore
from router.core.events import PoolNodeLost, PoolNodeSaid, Send, Submitted, WorkerLost, WorkerSaid
from router.core.load.prefill_queue import Ahead
from router.core.state.directory import Directory
from tests.unit.router_kit import core_with, hello, key, request, reserved, says

A, B, NODE = Incarnation("a"), Incarnation("b"), Incarnation("node")


def _hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def _stored(*numbers: int, tier: Tier = Tier.DEVICE) -> BlockChanges:
    return BlockChanges(tier=tier, stored=tuple(map(_hash, numbers)))


def _removed(*numbers: int, tier: Tier = Tier.DEVICE) -> BlockChanges:
    return BlockChanges(tier=tier, removed=tuple(map(_hash, numbers)))


def _update(sequence: int, *blocks: BlockChanges, node: Incarnation = NODE) -> PoolUpdate:
    return PoolUpdate(sequence=sequence, node=node, blocks=blocks)


def test_the_longest_prefix_of_every_holder() -> None:
    directory = Directory()
    directory.changed(A, _stored(1, 2, 3))
    directory.changed(B, _stored(1, 3, 4))
    chain = [_hash(n) for n in (1, 2, 3, 4)]
    assert directory.longest(chain) == {A: 3, B: 1}
    directory.changed(A, _removed(2))
    assert directory.longest(chain) == {A: 1, B: 1}
    assert directory.longest([_hash(9)]) == {}
    directory.validate()


def test_tiers_of_a_holder_complete_each_other() -> None:
    directory = Directory()
    directory.changed(NODE, _stored(1, 2, tier=Tier.HOST))
    directory.changed(NODE, _stored(2, 3, tier=Tier.DISK))
    chain = [_hash(n) for n in (1, 2, 3)]
    assert directory.longest(chain) == {NODE: 3}
    directory.changed(NODE, _removed(2, tier=Tier.HOST))
    assert directory.longest(chain) == {NODE: 3}
    directory.validate()


def test_a_pool_node_is_forgotten_with_its_stream() -> None:
    directory, chain = Directory(), [_hash(1), _hash(2)]
    directory.updated(_update(0, _stored(1, tier=Tier.HOST)))
    directory.updated(_update(1, _stored(2, tier=Tier.DISK)))
    directory.changed(A, _stored(1))
    assert directory.longest(chain) == {NODE: 2, A: 1}
    directory.lost(NODE)
    assert directory.longest(chain) == {A: 1}
    assert directory.entries == 1 and not directory.pool_nodes
    directory.lost(NODE)
    directory.validate()


@pytest.mark.parametrize("sequence", [1, 2, 4, 9])
def test_a_pool_node_of_which_an_update_is_missing_is_forgotten(sequence: int) -> None:
    directory = Directory()
    for number in range(3):
        directory.updated(_update(number, _stored(number, tier=Tier.HOST)))
    with pytest.raises(PeerError, match=f"update {sequence} came in the place of 3"):
        directory.updated(_update(sequence, _stored(9, tier=Tier.HOST)))
    assert directory.entries == 0 and not directory.pool_nodes
    directory.validate()


def test_a_stream_that_begins_again_replaces_what_was_known() -> None:
    directory = Directory()
    directory.updated(_update(0, _stored(1, 2, tier=Tier.HOST)))
    directory.updated(_update(0, _stored(2, tier=Tier.HOST)))
    assert directory.longest([_hash(1)]) == {}
    assert directory.longest([_hash(2)]) == {NODE: 1}
    directory.validate()


def test_another_life_of_a_node_begins_with_its_first_update() -> None:
    directory, other = Directory(), Incarnation("another life")
    directory.updated(_update(0, _stored(1, tier=Tier.HOST)))
    with pytest.raises(PeerError, match="update 1 came in the place of 0"):
        directory.updated(_update(1, _stored(2, tier=Tier.HOST), node=other))
    assert directory.longest([_hash(1)]) == {NODE: 1}
    directory.lost(NODE)
    directory.updated(_update(0, _stored(2, tier=Tier.HOST), node=other))
    assert directory.longest([_hash(2)]) == {other: 1}
    directory.validate()


def test_it_keeps_no_more_than_it_may() -> None:
    directory = Directory(most_entries=3)
    directory.changed(A, _stored(1, 2))
    directory.changed(B, _stored(1, 2, 3))
    assert directory.entries == 3
    assert directory.longest([_hash(1), _hash(2)]) == {A: 2, B: 1}
    directory.changed(A, _removed(1, 2))
    directory.changed(B, _stored(2, 3))
    assert directory.longest([_hash(1), _hash(2), _hash(3)]) == {B: 3}
    directory.validate()


def test_random_changes_against_naive_sets() -> None:
    draw, directory = random.Random(5), Directory()
    naive: dict[Incarnation, set[int]] = {A: set(), B: set()}
    for _ in range(2000):
        worker = draw.choice([A, B])
        numbers = draw.sample(range(30), draw.randint(0, 5))
        match draw.randrange(5):
            case 0 | 1:
                directory.changed(worker, _stored(*numbers))
                naive[worker] |= set(numbers)
            case 2:
                directory.changed(worker, _removed(*numbers))
                naive[worker] -= set(numbers)
            case 3 if draw.random() < 0.1:
                directory.lost(worker)
                naive[worker] = set()
        chain = draw.sample(range(30), 6)
        expected = {w: _prefix(chain, held) for w, held in naive.items() if _prefix(chain, held)}
        assert directory.longest(map(_hash, chain)) == expected
        directory.validate()


def _prefix(chain: list[int], held: set[int]) -> int:
    return next((i for i, n in enumerate(chain) if n not in held), len(chain))


def test_news_are_coalesced() -> None:
    news = BlockNews()
    news.stored(_hash(1))
    news.stored(_hash(2))
    news.removed(_hash(1))
    assert news.take() == ((_hash(2),), ())
    news.removed(_hash(2))
    news.stored(_hash(2))
    news.removed(_hash(3))
    assert news.take() == ((), (_hash(3),))
    assert news.take() == ((), ())


# --- what the router tells ----------------------------------------------------------------------


def _chain(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """As the workers of the kit name the prompt's blocks."""
    worker = hello("p", Role.PREFILL)
    names = BlockNames(
        fingerprint=worker.fingerprint,
        physical_format=worker.physical_format,
        rope_border_tokens=worker.rope_border_tokens,
    )
    chain = names.chain("", len(tokens), worker.block_size)
    chain.extend(tokens, len(tokens))
    assert list(chain.walk(tokens, len(tokens))) == list(chain.full(len(tokens)))
    return tuple(chain.full(len(tokens)))


def _holds(core: RouterCore, worker: str, hashes: tuple[bytes, ...]) -> None:
    blocks = (BlockChanges(tier=Tier.DEVICE, stored=hashes),)
    incarnation = Incarnation(worker)
    said = WorkerSaid(incarnation=incarnation, events=(), counters=Counters(), blocks=blocks)
    core.handle(said, 0)


LONG = tuple(range(1, 12))  # two blocks and three tokens


def _core() -> RouterCore:
    """Two workers prefill, and the router sends prompts to `p`."""
    core = core_with(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    ahead = Ahead(seconds=100, tokens=100)
    core.state.workers[Incarnation("q")].queue.add(key("elsewhere"), ahead, 0)
    return core


def _source(core: RouterCore) -> PrefixSource | None:
    core.handle(Submitted(request=replace(request(), prompt_ids=LONG)), 1)
    sends = [c.message for c in says(core, "d", reserved()) if isinstance(c, Send)]
    (order,) = [message for message in sends if isinstance(message, Prefill)]
    return order.prefix_source


def _of(worker: str, blocks: int) -> PrefixSource:
    return PrefixSource(peer=Incarnation(worker), addresses=(f"loopback:{worker}",), blocks=blocks)


def test_the_order_names_who_has_more_of_the_prompt() -> None:
    chain, core = _chain(LONG), _core()
    _holds(core, "p", chain[:1])
    _holds(core, "d", chain)
    assert _source(core) == _of("d", 2)


def test_the_less_busy_of_two_is_named() -> None:
    chain, core = _chain(LONG), _core()
    _holds(core, "q", chain)
    _holds(core, "d", chain)
    assert _source(core) == _of("d", 2)


def test_nobody_is_named_who_has_no_more_or_is_gone() -> None:
    chain, core = _chain(LONG), _core()
    _holds(core, "p", chain[:1])
    _holds(core, "d", chain[:1])
    _holds(core, "q", chain)
    core.handle(WorkerLost(incarnation=Incarnation("q")), 1)
    assert _source(core) is None


def _pooled(
    core: RouterCore,
    worker: str,
    hashes: tuple[bytes, ...],
    *,
    node: Incarnation = NODE,
    addresses: tuple[str, ...] = ("nixl:far",),
) -> None:
    """The node of the worker's host holds them."""
    update = PoolUpdate(
        sequence=0,
        node=node,
        addresses=addresses,
        workers=(Incarnation(worker),),
        blocks=(BlockChanges(tier=Tier.HOST, stored=hashes),),
    )
    core.handle(PoolNodeSaid(update=update), 0)
    core.state.directory.validate()


def _in_node(blocks: int) -> PrefixSource:
    return PrefixSource(peer=NODE, addresses=("nixl:far",), blocks=blocks, is_pool_node=True)


def test_the_pool_node_of_another_host_is_named() -> None:
    core = _core()
    _pooled(core, "q", _chain(LONG))
    assert _source(core) == _in_node(2)


def test_a_worker_with_as_much_is_named_before_a_pool_node() -> None:
    core = _core()
    _pooled(core, "q", _chain(LONG))
    _holds(core, "d", _chain(LONG))
    assert _source(core) == _of("d", 2)


@pytest.mark.parametrize("near", [1, 2])
def test_only_a_far_node_that_has_more_than_the_near_one_is_named(near: int) -> None:
    core = _core()
    _pooled(core, "q", _chain(LONG))
    _pooled(core, "p", _chain(LONG)[:near], node=Incarnation("near"), addresses=("nixl:near",))
    assert _source(core) == (_in_node(2) if near == 1 else None)


def test_a_pool_node_that_can_not_be_reached_or_is_asked_anyway_is_not_named() -> None:
    hidden, own = _core(), _core()
    _pooled(hidden, "q", _chain(LONG), addresses=())
    _pooled(own, "p", _chain(LONG))
    assert hidden.state.directory.longest(_chain(LONG)) == {NODE: 2}
    assert _source(hidden) is None
    assert _source(own) is None


def test_a_pool_node_outlives_the_workers_of_its_host() -> None:
    core = _core()
    _pooled(core, "q", _chain(LONG))
    core.handle(WorkerLost(incarnation=Incarnation("q")), 1)
    assert _source(core) == _in_node(2)


def test_a_pool_node_that_is_lost_is_not_named() -> None:
    core = _core()
    _pooled(core, "q", _chain(LONG))
    core.handle(PoolNodeLost(node=NODE), 1)
    assert _source(core) is None


def test_the_last_token_is_always_computed() -> None:
    core, prompt = _core(), LONG[:8]
    _holds(core, "d", _chain(prompt))
    core.handle(Submitted(request=replace(request(), prompt_ids=prompt)), 1)
    (order,) = [c.message for c in says(core, "d", reserved()) if _is_prefill(c)]
    assert order.prefix_source == _of("d", 1)


def _is_prefill(command: object) -> bool:
    return isinstance(command, Send) and isinstance(command.message, Prefill)
