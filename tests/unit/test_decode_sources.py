"""A decode worker fetches from where a router says: what it prefills itself, and what comes to it
through the pool."""

from __future__ import annotations

from decode_worker.batch import Batch
from decode_worker.running_set import TierShares
from decode_worker.scheduler import DecodeScheduler
from engine.core.step import StepWanted
from kvpool.core.blocks.holding import Holder
from kvpool.core.fetch.client_events import SendPool
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.node.messages import FetchWanted
from kvpool.core.transfer.commands import FromPeer
from kvpool.core.transfer.messages import Commit, HandoffMode, PrefixStored
from kvrelay.messages import Abort, Generate, LifetimeMoment, PrefixSource, Reserve
from kvrelay.types import Incarnation, PrefixOrigin, RequestSpec
from tests.unit.pool_nodes_kit import PlayedNodes
from tests.unit.worker_kit import (
    BLOCK,
    P,
    done,
    from_p,
    key,
    names,
    reservations,
    spec,
    the_step,
)

NODE = Incarnation("node")
A = Holder("decode", key("a"))


class Scene:
    """A decode worker; its host's pool has nothing."""

    def __init__(self, *, blocks: int = 16) -> None:
        owner = reservations(blocks=blocks, mode=HandoffMode.POOL)
        owner.tables.device.reports = True
        self.pool = PoolUse(owner.tables, cost := RestoreCost(BLOCK))
        self.lookup = PrefixLookup(tables=owner.tables, cost=cost, pool=self.pool)
        self.nodes = PlayedNodes(self.lookup)
        batch = Batch(lookup=self.lookup, chunk_tokens=32, shares=TierShares(slots=4))
        self.decode = DecodeScheduler(reservations=owner, batch=batch)

    def wanted(self) -> tuple[Incarnation, FetchWanted]:
        """Which node is asked for what, once its host's pool has answered."""
        self.nodes.sought()
        assert self.nodes.found(0) == []
        return self.nodes.wanted()

    def fetched(self, blocks: int) -> Restored:
        (end,) = self.nodes.fetched(blocks)
        self.decode.handle(end, 2)
        return end

    def step(self) -> tuple[int, int]:
        """Of the one sequence in the next step: where it begins, and its tokens."""
        (one,) = the_step(self.decode.handle(StepWanted(), 2)).batch.slices
        return one.start, len(one.token_ids)

    def reserved(self, request: RequestSpec, blocks: int) -> None:
        """Its prompt is computed, and was stored; NODE has so much of it."""
        source = _node(blocks)
        self.decode.handle(Reserve(spec=request, source=P, prefix_source=source), 0)
        commit = Commit(key=request.key, pieces=0, first_token_ids=(7,) * request.sampling.n)
        self.decode.handle(from_p(commit), 0)
        self.decode.handle(StepWanted(), 0)


def _node(blocks: int) -> PrefixSource:
    return PrefixSource(peer=NODE, addresses=("x:1",), blocks=blocks, is_pool_node=True)


def test_a_prompt_that_it_prefills_itself_is_fetched_from_the_node_that_was_named() -> None:
    scene = Scene()
    prompt = spec("a", 3 * BLOCK + 2)
    assert names(scene.decode.handle(Generate(spec=prompt, prefix_source=_node(3)), 0)) == [
        "Reserved"
    ]
    node, wanted = scene.wanted()
    assert (node, len(wanted.hashes)) == (NODE, 3)
    assert scene.decode.handle(StepWanted(), 1) == []
    restored = scene.fetched(2)
    assert restored == Restored(holder=A, tokens=2 * BLOCK, origin=PrefixOrigin.REMOTE)
    assert scene.step() == (2 * BLOCK, BLOCK + 2)


def test_a_prompt_that_comes_through_the_pool_is_fetched_from_the_node_that_was_named() -> None:
    scene = Scene()
    scene.reserved(spec("a", 3 * BLOCK), 3)
    node, wanted = scene.wanted()
    assert (node, len(wanted.hashes)) == (NODE, 3)
    scene.fetched(3)
    assert scene.step() == (3 * BLOCK, 1)


def test_one_choice_fetches_for_all() -> None:
    scene = Scene()
    scene.reserved(spec("a", 3 * BLOCK, n=2), 3)
    assert scene.wanted()[0] == NODE


def test_without_a_source_only_the_own_pool_is_asked() -> None:
    scene = Scene()
    scene.decode.handle(Generate(spec=spec("a", 9)), 0)
    scene.nodes.sought()
    assert scene.nodes.found(0) == [Restored.found_here(A, 0)]
    assert scene.nodes.orders() == []


def test_a_source_is_asked_once_and_not_when_the_sequence_comes_again() -> None:
    """It is preempted for blocks; by then the source may be gone."""
    scene = Scene()
    scene.decode.handle(Generate(spec=spec("a", 9), prefix_source=_node(2)), 0)
    assert scene.wanted()[0] == NODE
    scene.fetched(0)
    assert scene.step() == (0, 9)
    done(scene.decode, (5,))
    (sequence,) = scene.decode.batch.running_set.running
    scene.decode.batch.running_set.preempt(sequence)
    scene.decode.handle(StepWanted(), 3)
    assert sequence.hint is None
    assert scene.nodes.orders() == []


def test_one_that_ends_while_it_is_fetched_keeps_its_blocks_until_then() -> None:
    scene = Scene()
    scene.decode.handle(Generate(spec=spec("a", 9), prefix_source=_node(2)), 0)
    scene.wanted()
    scene.nodes.granted(2)
    assert names(scene.decode.handle(Abort(key=key("a")), 1)) == []
    assert scene.lookup.is_fetching(A)
    (end,) = scene.nodes.copied(2)
    assert end == Restored.found_here(A, 0)
    assert names(scene.decode.handle(end, 2)) == ["Released"]
    scene.decode.validate()


# --- ahead --------------------------------------------------------------------------------------

JOINED = [LifetimeMoment.HANDOFF_COMMITTED]


def _told(scene: Scene, blocks: int) -> list[str]:
    """P has stored so much of it."""
    return names(scene.decode.handle(from_p(PrefixStored(key=A.key, tokens=blocks * BLOCK)), 0))


def _committed(scene: Scene) -> list[str]:
    commit = Commit(key=A.key, pieces=0, first_token_ids=(7,))
    return names(scene.decode.handle(from_p(commit), 0))


def _reserved(*, blocks: int = 16) -> Scene:
    scene = Scene(blocks=blocks)
    request = Reserve(spec=spec("a", 3 * BLOCK + 1), source=P, prefix_source=_node(3))
    scene.decode.handle(request, 0)
    return scene


def test_what_is_stored_is_fetched_while_the_rest_of_the_prompt_is_computed() -> None:
    scene = _reserved()
    assert _told(scene, 2) == []
    node, first = scene.wanted()
    assert (node, first.skip, len(first.hashes)) == (NODE, 0, 2)
    _told(scene, 3)
    assert scene.nodes.orders() == [], "one fetch at a time"
    scene.fetched(2)
    _, rest = scene.wanted()
    assert (rest.skip, len(rest.hashes)) == (2, 3)
    assert _committed(scene) == [], "it joins when all that is on its way has come"
    (end,) = scene.nodes.fetched(1)
    assert names(scene.decode.handle(end, 2)) == JOINED
    scene.decode.validate()
    assert scene.step() == (3 * BLOCK, 2)
    assert scene.nodes.orders() == [] and scene.lookup.origins[PrefixOrigin.DEVICE] == 1


def test_what_the_pool_does_not_have_after_all_is_asked_for_once() -> None:
    scene = _reserved()
    _told(scene, 2)
    scene.wanted()
    scene.fetched(0)
    assert scene.nodes.orders() == []
    _told(scene, 2)
    assert scene.nodes.orders() == []
    assert _committed(scene) == JOINED


def test_one_that_is_given_up_while_it_is_fetched_ahead_is_released_when_the_fetch_ends() -> None:
    scene = _reserved()
    _told(scene, 2)
    scene.wanted()
    assert names(scene.decode.handle(Abort(key=key("a")), 1)) == []
    assert _told(scene, 3) == []
    (end,) = scene.nodes.fetched(2)
    assert names(scene.decode.handle(end, 2)) == ["Released"]
    scene.decode.validate()
    assert not list(scene.lookup.tables.held())


def test_without_free_blocks_nothing_is_fetched_ahead() -> None:
    scene = _reserved(blocks=4)
    assert scene.lookup.tables.try_grow(Holder("decode", key("b")), 3 * BLOCK, now_s=0)
    _told(scene, 2)
    scene.nodes.sought()
    (end,) = scene.nodes.found(2)
    scene.decode.handle(end, 1)
    assert NODE not in {one.node for one in scene.nodes.orders() if isinstance(one, SendPool)}
    assert len(list(scene.lookup.tables.held())) == 1
    assert _committed(scene) == JOINED


def test_a_stranger_can_not_have_anything_fetched() -> None:
    scene = _reserved()
    told = PrefixStored(key=A.key, tokens=2 * BLOCK)
    stranger = FromPeer(peer=Incarnation("stranger"), message=told)
    assert scene.decode.handle(stranger, 0) == [] and scene.nodes.orders() == []
