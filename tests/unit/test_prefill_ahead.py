"""A step of prompts is launched behind the one on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from engine.core.step import (
    Command,
    OverlapStepWanted,
    RunStep,
    Sampled,
    StepDone,
    StepOutcome,
    StepWanted,
)
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, LayerGroup, Plane
from kvpool.core.transfer.commands import LayersWritten, PeerLost, WriteSlab
from kvpool.core.transfer.messages import PiecesAhead
from kvrelay.messages import Abort, Released
from kvrelay.types import RequestSpec
from prefill_worker.scheduler import PrefillScheduler
from tests.unit.test_prefill_scheduler import assert_gone, lent
from tests.unit.worker_kit import (
    BLOCK,
    LAYOUT,
    D,
    done,
    events,
    from_d,
    hello,
    key,
    local_lookup,
    names,
    prefill_of,
    prefill_scheduler,
    spec,
    the_step,
    to_peer,
)


def wanted(scheduler: PrefillScheduler) -> list[Command]:
    """The device is free."""
    return scheduler.handle(StepWanted(), 0)


def behind(scheduler: PrefillScheduler) -> list[Command]:
    """A step is on the device."""
    return scheduler.handle(OverlapStepWanted(), 0)


def chunks(commands: list[Command]) -> list[tuple[str, int, int]]:
    """# of each slice: request, start, end"""
    steps = [one for one in commands if isinstance(one, RunStep)]
    return [
        (piece.key.request_id, piece.start, piece.start + len(piece.token_ids))
        for step in steps
        for piece in step.batch.slices
    ]


def asked(scheduler: PrefillScheduler, *requests: RequestSpec) -> PrefillScheduler:
    for request in requests:
        scheduler.handle(prefill_of(request), 0)
    return scheduler


def other(name: str, tokens: int, first: int = 500) -> RequestSpec:
    """It shares no block with `spec`."""
    return replace(spec(name, tokens), prompt_ids=tuple(range(first, first + tokens)))


# --- chunks -------------------------------------------------------------------------------------


def test_the_next_chunk_starts_where_the_launched_one_will_end() -> None:
    scheduler = asked(prefill_scheduler(chunk=8), spec("a", 21))
    first, second = wanted(scheduler), behind(scheduler)
    assert chunks(first) == [("a", 0, 8)] and chunks(second) == [("a", 8, 16)]
    assert scheduler.queue.tokens == 21, "nothing is computed yet"
    assert names(second) == [], "it started with its first chunk"
    assert names(done(scheduler, ())) == ["prefill_chunk"]
    third = behind(scheduler)
    assert chunks(third) == [("a", 16, 21)]
    samples = [the_step(step).batch.slices[0].samples for step in (first, second, third)]
    assert [len(one) for one in samples] == [0, 0, 1]
    scheduler.validate()


def test_a_prompt_whose_tokens_are_all_launched_waits_and_is_in_no_further_step() -> None:
    scheduler = asked(prefill_scheduler(chunk=8), spec("a", 14))
    wanted(scheduler), behind(scheduler)
    done(scheduler, ())
    assert behind(scheduler) == []
    assert len(scheduler.queue) == 1 and scheduler.queue.tokens == 6
    asked(scheduler, other("b", 3))
    assert chunks(behind(scheduler)) == [("b", 0, 3)]
    assert names(done(scheduler, (9,))) == ["prefill_chunk", "Tokens"]
    assert [job.key for job in scheduler.queue.awaiting_prefill.values()] == [key("b")]
    scheduler.validate()


def test_pieces_are_announced_with_the_launch_and_leave_when_their_step_has_ended() -> None:
    scheduler = asked(prefill_scheduler(chunk=8), spec("a", 16))
    told = [*to_peer(wanted(scheduler)), *to_peer(behind(scheduler))]
    spans = [one.piece.span for one in told if isinstance(one, PiecesAhead)]
    assert [(one.start, one.start + one.tokens) for one in spans] == [(0, 8), (8, 16)]
    assert scheduler.handle(from_d(lent("a", 1)), 0) == []
    assert [c for c in done(scheduler, ()) if isinstance(c, WriteSlab)] == []
    (write,) = [c for c in done(scheduler, (9,)) if isinstance(c, WriteSlab)]
    assert write.piece.span.start == 8


# --- marks --------------------------------------------------------------------------------------

TWO_LAYERS = replace(LAYOUT, groups=(replace(LAYOUT.groups[0], layers=(0, 1)),))


def marked(chunk: int = 8, slab_tokens: int = 4) -> PrefillScheduler:
    """A piece has one layer of four tokens."""
    scheduler = PrefillScheduler(
        lookup=local_lookup(BlockTables(TWO_LAYERS, 16)), chunk_tokens=chunk
    )
    facts = replace(hello(D).message.kv, slab_bytes=8 * LAYOUT.bytes_per_token)  # type: ignore[union-attr]
    scheduler.handle(hello(D, facts), 0)
    return scheduler


def writes(commands: list[Command]) -> list[tuple[int, int]]:
    """# of each piece that leaves: where it starts, its last layer"""
    found = [c for c in commands if isinstance(c, WriteSlab)]
    return [(one.piece.span.start, one.write.last_layer) for one in found]


def lend_all(scheduler: PrefillScheduler, name: str = "a", pieces: int = 4) -> None:
    for piece in range(pieces):
        assert scheduler.handle(from_d(lent(name, piece, slab=piece)), 0) == []


def test_a_mark_belongs_to_its_step_and_not_to_the_one_that_ends_first() -> None:
    """The second step writes its first layer before the end of the first step is told."""
    scheduler = asked(marked(), spec("a", 16))
    first, second = the_step(wanted(scheduler)), the_step(behind(scheduler))
    assert first.layer_marks == second.layer_marks == {0}
    assert first.number != second.number
    lend_all(scheduler)
    assert writes(scheduler.handle(LayersWritten(0, first.number), 0)) == [(0, 0)]
    assert writes(scheduler.handle(LayersWritten(0, second.number), 0)) == [(8, 0)]
    assert writes(done(scheduler, ())) == [(0, 1)]
    assert writes(scheduler.handle(LayersWritten(0, first.number), 0)) == [], "it has ended"
    assert writes(done(scheduler, (9,))) == [(8, 1)]


def test_a_mark_of_the_first_step_moves_nothing_of_the_second() -> None:
    scheduler = asked(marked(), spec("a", 16))
    first, _ = the_step(wanted(scheduler)), behind(scheduler)
    lend_all(scheduler)
    assert writes(scheduler.handle(LayersWritten(0, first.number), 0)) == [(0, 0)]


def test_a_step_is_marked_for_its_own_pieces_alone() -> None:
    """The rest of the prompt leaves in one piece, with the last layer."""
    scheduler = asked(marked(), spec("a", 12))
    first, second = the_step(wanted(scheduler)), the_step(behind(scheduler))
    assert (first.layer_marks, second.layer_marks) == ({0}, frozenset())


def test_the_first_step_goes_on_after_a_mark_of_the_second() -> None:
    """As in a pipeline: what each has written is known, also to slabs that are lent later."""
    scheduler = asked(marked(), spec("a", 16))
    first, second = the_step(wanted(scheduler)), the_step(behind(scheduler))
    scheduler.handle(LayersWritten(0, second.number), 0)
    scheduler.handle(LayersWritten(0, first.number), 0)
    told = [scheduler.handle(from_d(lent("a", piece, slab=piece)), 0) for piece in range(4)]
    assert [writes(one) for one in told] == [[(0, 0)], [], [(8, 0)], []]


# --- endings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first ends", "before the second ends"])
def test_an_aborted_prompt_keeps_its_blocks_until_its_last_step_has_ended(when: str) -> None:
    scheduler = asked(prefill_scheduler(chunk=8), spec("a", 20))
    wanted(scheduler), behind(scheduler)
    if when == "before the second ends":
        done(scheduler, ())
    assert scheduler.handle(Abort(key=key("a")), 1) == []
    if when == "before the first ends":
        assert names(done(scheduler, ())) == ["prefill_chunk"]
    scheduler.validate()
    assert scheduler.tables.free_blocks < scheduler.tables.blocks
    assert behind(scheduler) == [], "nothing more of it is launched"
    assert names(done(scheduler, ())) == ["prefill_chunk", "Released"]
    assert_gone(scheduler)


def test_an_aborted_prompt_that_is_in_the_second_step_alone_keeps_its_blocks() -> None:
    scheduler = asked(prefill_scheduler(chunk=8), spec("a", 8))
    wanted(scheduler)
    asked(scheduler, other("b", 3))
    assert chunks(behind(scheduler)) == [("b", 0, 3)]
    assert scheduler.handle(Abort(key=key("b")), 1) == []
    assert names(done(scheduler, (9,))) == ["prefill_chunk", "Tokens"]
    assert Holder("prefill", key("b")) in scheduler.tables
    assert names(done(scheduler, (9,))) == ["prefill_chunk", "Released"]
    assert Holder("prefill", key("b")) not in scheduler.tables


def test_a_lost_peer_with_two_steps_on_the_device() -> None:
    scheduler = asked(prefill_scheduler(chunk=8), spec("a", 20))
    wanted(scheduler), behind(scheduler)
    lost = scheduler.handle(PeerLost(peer=D, reason="gone"), 0)
    assert names(lost) == ["RequestFailed"]
    done(scheduler, ())
    assert "Released" in names(done(scheduler, ()))
    assert_gone(scheduler)


# --- alone --------------------------------------------------------------------------------------


def test_a_prompt_that_runs_alone_has_the_device_for_itself() -> None:
    alone = replace(other("s", 12), alone_tokens=1)
    scheduler = asked(prefill_scheduler(chunk=8, blocks=40), spec("a", 20), alone)
    assert chunks(wanted(scheduler)) == [("s", 0, 8)], "the shorter one goes first"
    assert behind(scheduler) == [], "neither its own next chunk nor another prompt"
    done(scheduler, ())
    assert chunks(wanted(scheduler)) == [("s", 8, 12)]
    assert behind(scheduler) == []
    done(scheduler, (9,))
    assert chunks(wanted(scheduler)) == [("a", 0, 8)]
    assert chunks(behind(scheduler)) == [("a", 8, 16)]


def test_others_that_are_launched_ahead_do_not_starve_it() -> None:
    """When it is its turn, nothing is launched before the device is free for it."""
    scheduler = asked(prefill_scheduler(chunk=8, blocks=60), spec("a", 16))
    wanted(scheduler)
    asked(scheduler, replace(other("s", 5), alone_tokens=1), other("z", 30, 900))
    assert behind(scheduler) == []
    done(scheduler, ())
    assert chunks(wanted(scheduler)) == [("s", 0, 5)]


def test_it_does_not_go_on_beside_others_while_the_first_prompt_lacks_blocks() -> None:
    alone = replace(other("s", 24), alone_tokens=1)
    scheduler = asked(prefill_scheduler(chunk=8, blocks=11), alone)
    wanted(scheduler)
    done(scheduler, ())
    asked(scheduler, other("y", 12, 600))
    assert chunks(wanted(scheduler)) == [("y", 0, 8)]
    asked(scheduler, other("x", 9, 700))
    assert chunks(behind(scheduler)) == [("y", 8, 12)]


# --- prefixes -----------------------------------------------------------------------------------


def test_a_prompt_waits_for_the_blocks_that_are_computed_for_another() -> None:
    scheduler = asked(prefill_scheduler(chunk=8, blocks=40), spec("a", 8))
    wanted(scheduler)
    asked(scheduler, spec("b", 13))
    assert behind(scheduler) == []
    done(scheduler, (9,))
    assert chunks(wanted(scheduler)) == [("b", 8, 13)]


def test_prompts_after_one_that_waits_for_such_blocks_go_on() -> None:
    scheduler = asked(prefill_scheduler(chunk=8, blocks=40), spec("a", 8))
    wanted(scheduler)
    asked(scheduler, spec("b", 9), other("c", 20))
    assert chunks(behind(scheduler)) == [("c", 0, 8)]
    done(scheduler, (9,))
    assert chunks(behind(scheduler)) == [("b", 8, 9), ("c", 8, 15)]


def test_it_waits_no_longer_than_they_share_blocks() -> None:
    """The other one is long; behind its shared part it holds nobody up."""
    scheduler = asked(prefill_scheduler(chunk=4, blocks=40), spec("a", 40))
    wanted(scheduler)
    shared = replace(spec("b", 12), prompt_ids=(*range(8), *range(700, 704)))
    asked(scheduler, shared)
    assert chunks(behind(scheduler)) == [("a", 4, 8)], "it is the next to be shared"
    done(scheduler, ())
    assert chunks(behind(scheduler)) == [("a", 8, 12)]
    done(scheduler, ())
    assert chunks(behind(scheduler)) == [("b", 8, 12)]


def test_a_prompt_with_the_rest_of_a_step_holds_nobody_up() -> None:
    """It could have a little of each step for ever, behind others."""
    scheduler = asked(prefill_scheduler(chunk=12, blocks=40), other("c", 8), spec("a", 20))
    assert chunks(wanted(scheduler)) == [("c", 0, 8), ("a", 0, 4)]
    asked(scheduler, spec("b", 9))
    assert chunks(behind(scheduler))[0] == ("b", 0, 9)


def test_a_half_filled_block_holds_nobody_up() -> None:
    scheduler = asked(prefill_scheduler(chunk=3, blocks=40), spec("a", 20))
    wanted(scheduler)
    asked(scheduler, spec("b", 9))
    assert chunks(behind(scheduler)) == [("b", 0, 3)]


def test_without_a_cache_nobody_waits_for_it() -> None:
    scheduler = PrefillScheduler(
        lookup=local_lookup(BlockTables(LAYOUT, 40, caching=False)), chunk_tokens=8
    )
    scheduler.handle(hello(D), 0)
    asked(scheduler, spec("a", 8))
    wanted(scheduler)
    asked(scheduler, spec("b", 9))
    assert chunks(behind(scheduler)) == [("b", 0, 8)]


# --- any schedule -------------------------------------------------------------------------------

WINDOWED = KvLayout(
    groups=(
        LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=1),)),
        LayerGroup(layers=(1,), planes=(Plane(name="k", heads=1, dim=1),), window=6),
    ),
    dtype="float32",
    block_size=BLOCK,
)


class Device:
    """Up to two steps; it looks at what they read when each of them runs."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.steps: list[RunStep] = []
        self.kv: dict[tuple[int, int, int], tuple[int, ...]] = {}  # group, block, slot |-> tokens
        self.most = 0

    def launch(self, commands: list[Command]) -> bool:
        steps = [one for one in commands if isinstance(one, RunStep)]
        self.steps += steps
        self.most = max(self.most, len(self.steps))
        return bool(steps)

    def run(self, specs: dict[str, RequestSpec]) -> StepDone:
        step = self.steps.pop(0)
        for piece in step.batch.slices:
            prompt = specs[piece.key.request_id].prompt_ids
            for group, table in enumerate(piece.tables):
                window = self.layout.groups[group].window
                low = 0 if window is None else max(0, piece.start - window + 1)
                end = piece.start + len(piece.token_ids)
                for position in range(piece.start, end):
                    assert table[position // BLOCK] != NO_BLOCK
                    self._at(group, table, position, prompt[: position + 1])
                for position in range(low, end):
                    place = group, table[position // BLOCK], position % BLOCK
                    assert self.kv[place] == prompt[: position + 1], "another prompt's KV"
        drawn = [
            (Sampled(token_id=9),) * len(piece.samples) if piece.samples else ()
            for piece in step.batch.slices
        ]
        return StepDone(outcome=StepOutcome(sampled=tuple(drawn)), seconds=0.1)

    def assert_held(self, tables: BlockTables) -> None:
        """Each prompt in a launched step still holds the blocks that the step reads and writes."""
        for piece in (piece for step in self.steps for piece in step.batch.slices):
            held = tables.tables(Holder("prefill", piece.key))
            end = piece.start + len(piece.token_ids)
            for group, kind in enumerate(self.layout.groups):
                low = 0 if kind.window is None else max(0, piece.start - kind.window + 1)
                used = slice(low // BLOCK, -(-end // BLOCK))
                assert held[group][used] == piece.tables[group][used]

    def _at(self, group: int, table: Sequence[int], position: int, seen: tuple[int, ...]) -> None:
        self.kv[group, table[position // BLOCK], position % BLOCK] = seen


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_computes_each_prompt_once_and_frees_all(seed: int, layout: KvLayout) -> None:
    rng = Random(seed)
    scheduler = PrefillScheduler(
        lookup=local_lookup(BlockTables(layout, rng.choice((8, 12, 30)))),
        chunk_tokens=rng.choice((2, 3, 8, 11)),
    )
    device, specs = Device(layout), dict[str, RequestSpec]()
    for n in range(14):
        shared = rng.choice((0, 4, 8, 13))
        prompt = (*range(shared), *(rng.randrange(1000) for _ in range(rng.randint(1, 15))))
        one = replace(spec(str(n), 1), prompt_ids=prompt, alone_tokens=rng.random() < 0.1)
        specs[str(n)] = one
    coming, aborted = [*specs.values()], {name for name in specs if rng.random() < 0.25}
    computed, gone, first = Counter[str](), Counter[str](), Counter[str]()

    def hear(commands: list[Command]) -> None:
        for event in events(commands):
            gone[event.key.request_id] += isinstance(event, Released)
            first[event.key.request_id] += type(event).__name__ == "Tokens"

    def launch(commands: list[Command]) -> bool:
        hear(commands)
        return device.launch(commands)

    while coming or device.steps or scheduler.has_work:
        for _ in range(min(len(coming), rng.choice((0, 1, 4)))):
            scheduler.handle(prefill_of(coming.pop()), 0)
        if not device.steps and not launch(wanted(scheduler)):
            assert not scheduler.has_work, "somebody stands still"
            continue
        if rng.random() < 0.9:
            launch(behind(scheduler))
        if aborted and rng.random() < 0.2 and len(coming) < 10:
            name = rng.choice([*aborted])
            hear(scheduler.handle(Abort(key=key(name)), 0))
            device.assert_held(scheduler.tables)
        alone = [{piece.key.request_id for piece in step.batch.slices} for step in device.steps]
        if any(specs[name].alone_tokens for step in alone for name in step):
            assert len(alone) == 1 and len(alone[0]) == 1
        if rng.random() < 0.7 or len(device.steps) == 2:
            for piece in device.steps[0].batch.slices:
                computed[piece.key.request_id] += len(piece.token_ids)
            hear(scheduler.handle(device.run(specs), 0))
            for job in [*scheduler.jobs.live()]:
                if job.first and not scheduler.queue.runs(job):
                    hear(scheduler.jobs.gone(job.key, 0))  # handed over
        device.assert_held(scheduler.tables)
        scheduler.validate()
    for name, one in specs.items():
        assert computed[name] <= len(one.prompt_ids)
        assert first[name] == 1 or name in aborted
        assert gone[name] == 1, name
    assert device.most == 2
    assert scheduler.tables.free_blocks == scheduler.tables.blocks
