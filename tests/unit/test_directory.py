"""The directory against a naive one, and what the router makes of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from kvpool.core.blocks.news import RunNews
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.hashes import BlockHash
from kvrelay.counters import Counters
from kvrelay.errors import PeerError
from kvrelay.messages import (
    BlockChanges,
    Generate,
    PoolUpdate,
    Prefill,
    PrefixSource,
    Reserve,
    StoredRun,
)
from kvrelay.types import Incarnation, Role, Tier
from kvrelay.wire import decode_changes, encode_batch
from router.core.core import RouterCore
from router.core.events import (
    Aborted,
    PoolNodeLost,
    PoolNodeSaid,
    Send,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.load.prefill_queue import Ahead
from router.core.state.directory import Directory
from router.core.state.known_runs import KnownRun
from tests.unit.directory_kit import (
    Named,
    StrandTree,
    chain,
    cut,
    ended,
    holding,
    known,
    run,
    told,
    unpacked,
)
from tests.unit.router_kit import core_with, hello, key, request, reserved, says

A, B, NODE = Incarnation("a"), Incarnation("b"), Incarnation("node")


LETTERS = "abc"


def _update(sequence: int, *blocks: BlockChanges, node: Incarnation = NODE) -> PoolUpdate:
    return PoolUpdate(sequence=sequence, node=node, blocks=blocks)


def _longest(directory: Directory, blocks: str) -> dict[Incarnation, int]:
    return directory.longest(Named(chain(blocks)))


def test_the_longest_prefix_of_every_holder() -> None:
    directory = Directory()
    directory.changed(A, holding(chain("abcd")))
    directory.changed(B, holding(chain("abxy")))
    directory.validate()
    assert _longest(directory, "abcz") == {A: 3, B: 2}
    assert _longest(directory, "abx") == {A: 2, B: 3}
    assert _longest(directory, "z") == _longest(directory, "") == {}
    directory.changed(A, ended(1, 1))
    assert _longest(directory, "abcd") == {A: 1, B: 2}
    directory.changed(A, ended(1, 0))
    assert _longest(directory, "abcd") == {B: 2}
    assert directory.blocks == 4
    directory.validate()


def test_the_tier_with_most_counts() -> None:
    directory = Directory()
    directory.changed(NODE, holding(chain("abcd"), tier=Tier.HOST))
    directory.changed(NODE, holding(chain("abx"), tier=Tier.DISK))
    assert _longest(directory, "abcd") == {NODE: 4}
    assert _longest(directory, "abx") == {NODE: 3}
    directory.changed(NODE, ended(1, 1, Tier.HOST))
    assert _longest(directory, "abcd") == {NODE: 2}
    directory.changed(NODE, ended(1, 0, Tier.DISK))
    assert _longest(directory, "abcd") == {NODE: 1}
    directory.validate()


@pytest.mark.parametrize("lengths", [(2, 3), (3, 2)])
def test_the_tier_with_most_of_the_same_run_counts(lengths: tuple[int, int]) -> None:
    directory, whole = Directory(), chain("abcd")
    directory.changed(A, holding(whole))
    for tier, length in zip((Tier.HOST, Tier.DISK), lengths, strict=True):
        directory.changed(NODE, holding(whole[:length], tier=tier))
    assert _longest(directory, "abcd") == {A: 4, NODE: 3}
    directory.validate()


def test_runs_that_are_gone_are_freed_at_once() -> None:
    """Without the garbage collector, which comes late where there are many objects."""
    directory = Directory()
    gc.collect()
    gc.disable()
    try:
        before = _runs_in_memory()
        for number, name in enumerate(["abcd", "abxy", "abxyz"], 1):
            directory.changed(A, holding(chain(name), number=number))
        assert _runs_in_memory() == before + directory._runs.runs
        directory.lost(A)
        assert _runs_in_memory() == before
    finally:
        gc.enable()


def _runs_in_memory() -> int:
    return sum(type(one) is KnownRun for one in gc.get_objects())


def test_holders_that_come_and_go_take_no_places() -> None:
    directory = Directory()
    for life in range(10):
        directory.changed(Incarnation(f"life {life}"), holding(chain("ab")))
        directory.changed(A, holding(chain("abcd")))
        assert _longest(directory, "abcd") == {f"life {life}": 2, A: 4}
        directory.lost(Incarnation(f"life {life}"))
        directory.validate()
    assert len(directory._places) == 2


def test_a_strand_shrinks_and_grows_with_other_blocks() -> None:
    directory, other = Directory(), chain("abxy")
    directory.changed(A, holding(chain("abcd")))
    directory.changed(B, holding(chain("abcdef")))
    grown = run(1, other[2:], parent=1, start=2)
    directory.changed(A, BlockChanges(tier=Tier.DEVICE, cut=(cut(1, 2),), stored=(grown,)))
    assert _longest(directory, "abxyz") == {A: 4, B: 2}
    assert _longest(directory, "abcdef") == {A: 2, B: 6}
    directory.validate()


def test_a_strand_that_is_gone_takes_nothing_of_its_parent() -> None:
    directory, whole = Directory(), chain("abcd")
    directory.changed(A, holding(whole[:2]))
    directory.changed(A, told(run(2, whole[2:], parent=1, start=2)))
    directory.changed(A, ended(2, 1))
    assert _longest(directory, "abcd") == {A: 2}
    directory.validate()
    directory.changed(A, ended(1, 0))
    assert directory.blocks == directory.used_bytes == 0


def test_a_run_that_one_holder_has_grows_in_place() -> None:
    directory, whole = Directory(), chain(range(20))
    for at in range(20):
        directory.changed(A, told(run(1, whole[at : at + 1], parent=at and 1, start=at)))
    assert directory._runs.runs == 1
    directory.changed(B, holding(whole))
    directory.changed(A, told(run(1, chain(range(30))[20:], parent=1, start=20)))
    assert directory._runs.runs == 2
    assert directory.longest(Named(chain(range(30)))) == {A: 30, B: 20}
    directory.validate()


@pytest.mark.parametrize(
    "stranger",
    [
        run(2, chain("abcx")[3:], parent=9, start=3),  # below a strand that is unknown
        run(2, chain("abcdx")[4:], parent=1, start=4),  # behind the end of its parent
        run(2, chain("x"), parent=1, start=0),
        run(2, chain("ax")[1:], start=1),
        run(2, chain("ax")[1:], parent=2, start=1),  # an unknown one grows
        run(1, chain("abcdx")[4:], parent=1, start=4),  # behind its end
        run(1, chain("x")),  # a number is used once
        run(2, []),
    ],
)
def test_what_does_not_fit_is_ignored_with_all_below_it(stranger: StoredRun) -> None:
    directory, whole = Directory(), chain("abc")
    directory.changed(A, holding(whole))
    directory.changed(A, told(stranger))
    directory.changed(A, told(run(3, chain("q"), parent=2, start=stranger.start + 1)))
    directory.changed(A, ended(2, 0))
    directory.changed(A, ended(2, stranger.start + 1))
    directory.changed(A, ended(3, 0))
    assert known(directory) == {A: {Tier.DEVICE: {*whole}}}
    directory.validate()


def test_a_strand_that_grows_where_another_one_begins_is_a_run_beside_it() -> None:
    directory = Directory()
    directory.changed(A, holding(chain("ab")))
    directory.changed(A, told(run(2, chain("abc")[2:], parent=1, start=2)))
    directory.changed(A, told(run(1, chain("abx")[2:], parent=1, start=2)))
    assert _longest(directory, "abc") == _longest(directory, "abx") == {A: 3}
    directory.validate()


@pytest.mark.parametrize("seed", range(10))
def test_nothing_that_holders_tell_is_an_error(seed: int) -> None:
    """Strands overlap, and lose ends below which others begin."""
    draw, directory = random.Random(seed), Directory(most_bytes=3_000)
    for _ in range(3000):
        number, start = draw.randrange(8), draw.randrange(6)
        hashes = chain(draw.choices("ab", k=start + draw.randint(0, 4)))[start:]
        stored = run(
            number, hashes, parent=draw.choice([0, number, draw.randrange(8)]), start=start
        )
        gone = cut(draw.randrange(8), draw.randrange(8))
        changes = BlockChanges(tier=draw.choice([*Tier]), cut=(gone,), stored=(stored,))
        directory.changed(draw.choice([A, B]), changes)
        _longest(directory, "".join(draw.choices("ab", k=9)))
    directory.lost(A)
    directory.lost(B)
    assert directory.blocks == directory.used_bytes == 0 and directory.dropped_blocks


def test_a_pool_node_is_forgotten_with_its_stream() -> None:
    directory = Directory()
    directory.updated(_update(0, holding(chain("a"), tier=Tier.HOST)))
    directory.updated(_update(1, holding(chain("ab"), tier=Tier.DISK)))
    directory.changed(A, holding(chain("a")))
    assert _longest(directory, "ab") == {NODE: 2, A: 1}
    directory.lost(NODE)
    assert _longest(directory, "ab") == {A: 1}
    assert directory.blocks == 1 and not directory.pool_nodes
    directory.lost(NODE)
    directory.validate()


@pytest.mark.parametrize("sequence", [1, 2, 4, 9])
def test_a_pool_node_of_which_an_update_is_missing_is_forgotten(sequence: int) -> None:
    directory = Directory()
    for number in range(3):
        blocks = holding(chain([number]), tier=Tier.HOST, number=number + 1)
        directory.updated(_update(number, blocks))
    with pytest.raises(PeerError, match=f"update {sequence} came in the place of 3"):
        directory.updated(_update(sequence, holding(chain([9]), tier=Tier.HOST)))
    assert directory.blocks == 0 and not directory.pool_nodes
    directory.validate()


def test_a_stream_that_begins_again_replaces_what_was_known() -> None:
    directory = Directory()
    directory.updated(_update(0, holding(chain("abc"), tier=Tier.HOST)))
    directory.updated(_update(0, holding(chain("x"), tier=Tier.HOST)))
    assert _longest(directory, "abc") == {}
    assert _longest(directory, "x") == {NODE: 1}
    directory.validate()


def test_another_life_of_a_node_begins_with_its_first_update() -> None:
    directory, other = Directory(), Incarnation("another life")
    directory.updated(_update(0, holding(chain("a"), tier=Tier.HOST)))
    with pytest.raises(PeerError, match="update 1 came in the place of 0"):
        directory.updated(_update(1, holding(chain("b"), tier=Tier.HOST), node=other))
    assert _longest(directory, "a") == {NODE: 1}
    directory.lost(NODE)
    directory.updated(_update(0, holding(chain("b"), tier=Tier.HOST), node=other))
    assert _longest(directory, "b") == {other: 1}
    directory.validate()


# --- what it takes ------------------------------------------------------------------------------


def test_few_more_names_are_asked_for_than_somebody_has() -> None:
    """And none twice as often as there are blocks where it is compared."""
    directory, whole = Directory(), chain(range(1000))
    directory.changed(A, holding(whole))
    hit = Named(whole)
    assert directory.longest(hit) == {A: 1000}
    assert len(hit.asked) < 10
    other = Named(chain([*range(40), *range(2000, 3000)]))
    assert directory.longest(other) == {A: 40}
    assert max(other.asked) < 64 and len(other.asked) < 12
    miss = Named(chain(range(1, 1000)))
    assert directory.longest(miss) == {} and miss.asked == {0}


def test_what_was_not_stored_or_asked_for_longest_is_dropped() -> None:
    directory = Directory()
    directory.changed(Incarnation("a"), holding(chain("a123")))
    directory.most_bytes = 5 * directory.used_bytes
    for name in "bcde":
        directory.changed(Incarnation(name), holding(chain(f"{name}123")))
    assert directory.dropped_blocks == 0
    assert _longest(directory, "a1") == {"a": 2}
    for name in "fg":
        directory.changed(Incarnation(name), holding(chain(f"{name}123")))
    assert directory.dropped_blocks == 8
    known_now = [name for name in "abcdefg" if _longest(directory, f"{name}1")]
    assert known_now == ["a", "d", "e", "f", "g"]
    directory.validate()


def test_ends_of_a_path_are_dropped_before_its_beginning() -> None:
    directory, whole = Directory(), chain("abcdefgh")
    directory.changed(A, holding(whole[:4]))
    directory.changed(A, told(run(2, whole[4:], parent=1, start=4)))
    directory.changed(A, told(run(3, chain("abcdxy")[4:], parent=1, start=4)))
    assert _longest(directory, "abcdefgh") == {A: 8}
    directory.most_bytes = directory.used_bytes - 1
    directory.changed(B, BlockChanges(tier=Tier.DEVICE))
    assert _longest(directory, "abcdxy") == {A: 4}
    assert _longest(directory, "abcdefgh") == {A: 8}
    directory.validate()


def test_what_was_dropped_is_unknown_until_it_is_stored_again() -> None:
    """Its strand may grow, shrink and have others below it meanwhile."""
    directory, whole = Directory(), chain(range(12))
    directory.changed(A, holding(whole[:4]))
    directory.changed(A, told(run(2, whole[4:8], parent=1, start=4)))
    directory.most_bytes = directory.used_bytes - 1
    directory.changed(A, told(run(2, whole[8:9], parent=2, start=8)))
    assert directory.longest(Named(whole)) == {A: 4}
    directory.most_bytes *= 2
    directory.changed(A, told(run(2, whole[9:10], parent=2, start=9)))
    directory.changed(A, told(run(3, whole[10:], parent=2, start=10)))
    assert directory.longest(Named(whole)) == {A: 4}
    directory.changed(A, ended(2, 6))
    directory.changed(A, told(run(2, whole[6:7], parent=2, start=6)))
    assert directory.longest(Named(whole)) == {A: 4}
    directory.changed(A, ended(2, 4))
    directory.changed(A, told(run(4, whole[4:8], parent=1, start=4)))
    assert directory.longest(Named(whole)) == {A: 8}
    directory.validate()


# --- against naive sets -------------------------------------------------------------------------


@dataclass(slots=True)
class _Sender:
    """A tier of a holder. `heard`: # strand |-> (begin, hashes), as they were told."""

    holder: Incarnation
    tier: Tier
    tree: StrandTree
    news: RunNews
    heard: dict[int, tuple[int, list[bytes]]] = field(default_factory=dict)

    def greet(self) -> None:
        self.heard.clear()
        self.tree.news[:] = [RunNews(self.tree, self.tree.parts)]
        self.news = self.tree.news[0]

    def tell(self, directories: Iterable[Directory], most: int) -> None:
        cuts, stored = self.news.take(most)
        for gone in cuts:
            begin, hashes = self.heard[gone.number]
            del hashes[gone.end - begin :]
        for one in stored:
            _, hashes = self.heard.setdefault(one.number, (one.start, []))
            hashes += unpacked(one.hashes)
        changes = BlockChanges(tier=self.tier, cut=cuts, stored=stored)
        (arrived,) = decode_changes(encode_batch([], Counters(), 0.0, [changes]).blocks)
        for directory in directories:
            directory.changed(self.holder, arrived)

    def blocks(self) -> set[bytes]:
        return {one for _, hashes in self.heard.values() for one in hashes}


def _senders(draw: random.Random) -> list[_Sender]:
    tiers = [(A, Tier.DEVICE), (B, Tier.DEVICE), (NODE, Tier.HOST), (NODE, Tier.DISK)]
    found = []
    for holder, tier in tiers:
        tree = StrandTree(draw)
        found.append(_Sender(holder, tier, tree, RunNews(tree)))
        found[-1].greet()
    return found


def _expected(senders: list[_Sender], hashes: list[BlockHash]) -> dict[Incarnation, int]:
    found: dict[Incarnation, int] = {}
    for one in senders:
        blocks = one.blocks()
        length = next((i for i, name in enumerate(hashes) if name not in blocks), len(hashes))
        found[one.holder] = max(length, found.get(one.holder, 0))
    return {holder: length for holder, length in found.items() if length}


def _happens(draw: random.Random, senders: list[_Sender], both: list[Directory]) -> None:
    one = draw.choice(senders)
    match draw.randrange(20):
        case 0:
            for directory in both:
                directory.lost(one.holder)
            for tier in senders:
                if tier.holder == one.holder:
                    tier.greet()
        case 1 | 2 | 3 | 4 | 5 | 6 if one.tree.parts:
            one.tree.evict()
        case 7 | 8 | 9 | 10:
            one.tell(both, draw.choice([1, 3, 100]))
        case _:
            one.tree.insert(_drawn(draw))


def _drawn(draw: random.Random) -> list[BlockHash]:
    return chain(draw.choices(LETTERS, weights=(6, 2, 1), k=draw.randint(1, 24)))


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_against_naive_sets(seed: int) -> None:
    """One directory has room for all. The other one knows less, and nothing that isn't true."""
    draw = random.Random(seed)
    large, small = both = [Directory(), Directory(most_bytes=8000)]
    senders = _senders(draw)
    for _ in range(500):
        _happens(draw, senders, both)
        asked = _drawn(draw)
        expected = _expected(senders, asked)
        assert large.longest(Named(asked)) == expected
        for holder, length in small.longest(Named(asked)).items():
            assert length <= expected.get(holder, 0)
        large.validate()
        small.validate()
    assert small.dropped_blocks > 50 and not large.dropped_blocks
    _check_all_told(senders, both)


def _check_all_told(senders: list[_Sender], both: list[Directory]) -> None:
    large, small = both
    for one in senders:
        while one.news:
            one.tell(both, 5)
    found, part = known(large), known(small)
    for one in senders:
        assert found.get(one.holder, {}).get(one.tier, set()) == one.tree.blocks() == one.blocks()
        assert part.get(one.holder, {}).get(one.tier, set()) <= one.tree.blocks()
        while one.tree.parts:
            one.tree.evict()
        one.tell(both, 5)
    for directory in both:
        directory.validate()
        assert directory.blocks == directory.used_bytes == 0


# --- what the router tells ----------------------------------------------------------------------


def _names(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """As the workers of the kit name the prompt's blocks."""
    worker = hello("p", Role.PREFILL)
    names = BlockNames(
        fingerprint=worker.fingerprint,
        physical_format=worker.physical_format,
        rope_border_tokens=worker.rope_border_tokens,
    )
    made = names.chain("", len(tokens), worker.block_size)
    made.extend(tokens, len(tokens))
    return tuple(made.full(len(tokens)).hashes())


def _holds(core: RouterCore, worker: str, hashes: tuple[bytes, ...]) -> None:
    blocks = (holding(hashes),)
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
    chain, core = _names(LONG), _core()
    _holds(core, "p", chain[:1])
    _holds(core, "d", chain)
    assert _source(core) == _of("d", 2)


def test_the_less_busy_of_two_is_named() -> None:
    chain, core = _names(LONG), _core()
    _holds(core, "q", chain)
    _holds(core, "d", chain)
    assert _source(core) == _of("d", 2)


def test_nobody_is_named_who_has_no_more_or_is_gone() -> None:
    chain, core = _names(LONG), _core()
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
        blocks=(holding(hashes, tier=Tier.HOST),),
    )
    core.handle(PoolNodeSaid(update=update), 0)
    core.state.directory.validate()


def _in_node(blocks: int) -> PrefixSource:
    return PrefixSource(peer=NODE, addresses=("nixl:far",), blocks=blocks, is_pool_node=True)


def test_the_pool_node_of_another_host_is_named() -> None:
    core = _core()
    _pooled(core, "q", _names(LONG))
    assert _source(core) == _in_node(2)


def test_a_worker_with_as_much_is_named_before_a_pool_node() -> None:
    core = _core()
    _pooled(core, "q", _names(LONG))
    _holds(core, "d", _names(LONG))
    assert _source(core) == _of("d", 2)


@pytest.mark.parametrize("near", [1, 2])
def test_only_a_far_node_that_has_more_than_the_near_one_is_named(near: int) -> None:
    core = _core()
    _pooled(core, "q", _names(LONG))
    _pooled(core, "p", _names(LONG)[:near], node=Incarnation("near"), addresses=("nixl:near",))
    assert _source(core) == (_in_node(2) if near == 1 else None)


def test_a_pool_node_that_can_not_be_reached_or_is_asked_anyway_is_not_named() -> None:
    hidden, own = _core(), _core()
    _pooled(hidden, "q", _names(LONG), addresses=())
    _pooled(own, "p", _names(LONG))
    assert hidden.state.directory.longest(Named(_names(LONG))) == {NODE: 2}
    assert _source(hidden) is None
    assert _source(own) is None


def test_a_pool_node_outlives_the_workers_of_its_host() -> None:
    core = _core()
    _pooled(core, "q", _names(LONG))
    core.handle(WorkerLost(incarnation=Incarnation("q")), 1)
    assert _source(core) == _in_node(2)


def test_a_pool_node_that_is_lost_is_not_named() -> None:
    core = _core()
    _pooled(core, "q", _names(LONG))
    core.handle(PoolNodeLost(node=NODE), 1)
    assert _source(core) is None


def test_the_last_token_is_always_computed() -> None:
    core, prompt = _core(), LONG[:8]
    _holds(core, "d", _names(prompt))
    core.handle(Submitted(request=replace(request(), prompt_ids=prompt)), 1)
    (order,) = [c.message for c in says(core, "d", reserved()) if _is_prefill(c)]
    assert order.prefix_source == _of("d", 1)


# --- what it tells a decode worker --------------------------------------------------------------


def _by_pool(*prefills: str) -> RouterCore:
    """Handoffs go through the pool; nobody has told of a block yet."""
    core = RouterCore()
    for name in prefills:
        core.handle(WorkerJoined(hello=hello(name, Role.PREFILL)), 0)
    core.handle(WorkerJoined(hello=hello("d", Role.DECODE, handoff_by_pool=True)), 0)
    return core


def _asked(core: RouterCore, tokens: tuple[int, ...] = LONG) -> Reserve | Generate:
    """What the decode worker is asked."""
    (ask,) = core.handle(Submitted(request=replace(request(), prompt_ids=tokens)), 1)
    assert isinstance(ask, Send) and isinstance(ask.message, Reserve | Generate)
    return ask.message


def test_what_will_be_computed_is_fetched_from_the_pool_node_of_that_host() -> None:
    core = _by_pool("p")
    _pooled(core, "p", ())
    assert _asked(core).prefix_source == _in_node(2)


def test_full_blocks_are_fetched_with_the_last_token_and_shorter_prompts_computed() -> None:
    core = _by_pool("p")
    _pooled(core, "p", ())
    assert _asked(core, LONG[:8]).prefix_source == _in_node(2)
    core.handle(Aborted(request_id="r"), 1)
    assert _asked(core, LONG[:3]).prefix_source is None


def test_the_pool_node_of_its_own_host_is_asked_anyway() -> None:
    core = _by_pool("p")
    update = PoolUpdate(
        sequence=0,
        node=NODE,
        addresses=("nixl:far",),
        workers=(Incarnation("p"), Incarnation("d")),
    )
    core.handle(PoolNodeSaid(update=update), 0)
    _pooled(core, "q", _names(LONG), node=Incarnation("other"), addresses=("nixl:other",))
    assert _asked(core).prefix_source is None


def test_where_that_node_can_not_be_reached_who_has_it_now_is_named() -> None:
    core = _by_pool("p")
    _pooled(core, "p", (), addresses=())
    _holds(core, "p", _names(LONG))
    assert _asked(core).prefix_source == _of("p", 2)


def test_a_decode_worker_that_is_sent_the_blocks_is_told_of_no_source() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE)
    _pooled(core, "p", _names(LONG))
    assert _asked(core).prefix_source is None


@pytest.mark.parametrize("near", [0, 1, 2])
def test_one_that_computes_the_prompt_itself_is_told_who_has_more(near: int) -> None:
    core = core_with(b=Role.BOTH)
    _pooled(core, "q", _names(LONG))
    _holds(core, "b", _names(LONG)[:near])
    asked = _asked(core)
    assert isinstance(asked, Generate)
    assert asked.prefix_source == (_in_node(2) if near < 2 else None)


def _is_prefill(command: object) -> bool:
    return isinstance(command, Send) and isinstance(command.message, Prefill)
