"""A model without a device: the next token is a hash of all before it, and KV is that history.

So a request's right tokens are known whatever the schedule, and wrong KV is noticed at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NewType

from engine.core.step import Sampled, SequenceSlice
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.fetch.cost import Rate, RestoreCost
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.transfer.link_cost import LinkCost, TransferShape, TransferWay
from kvpool.core.transfer.messages import SUMS, KvDigest, PlaneDigest
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import FinishReason, RequestKey, RequestSpec, Sampling

BLOCK = 4
TIERS = QosTiers(
    tiers=(
        QosTier(name="premium", priority=0, share=0.25),
        QosTier(name="standard", priority=1, share=0.25),
        QosTier(name="free", priority=2),
    ),
    default="free",
)
VOCABULARY = 50
NAMES = BlockNames(fingerprint="f", physical_format="float32")

History = NewType("History", int)
"""Names the tokens of a sequence up to and with one position, which its KV depends on."""
Content = list[History | None]
"""Of each (section, layer, token) of a write; None where nothing was ever written."""

PLANES = (Plane(name="k", heads=1, dim=1), Plane(name="v", heads=1, dim=1))
PLAIN = KvLayout(
    groups=(LayerGroup(layers=(0, 1, 2), planes=PLANES),), dtype="float32", block_size=BLOCK
)
GEMMA = replace(
    PLAIN,
    groups=(
        LayerGroup(layers=(0, 2), planes=PLANES),
        LayerGroup(layers=(1, 3), planes=PLANES, window=8),
    ),
)
MISTRAL = replace(PLAIN, groups=(LayerGroup(layers=(0, 1, 2), planes=PLANES, window=9),))
LAYOUT = GEMMA
ROW_BYTES = 8
"""One token of one layer."""
SLAB_BYTES = 8 * LAYOUT.bytes_per_token


@dataclass(frozen=True, kw_only=True)
class AnyWay(LinkCost):
    """A link whose cost model says now this, now that."""

    rng: random.Random

    @staticmethod
    def of(rng: random.Random) -> AnyWay:
        return AnyWay(
            rng=rng,
            transport="sim",
            latency_s=0.001,
            bytes_per_s=1e6,
            descriptor_s=0.0,
            direct_bytes_per_s=1e6,
            gather_bytes_per_s=1e6,
            scatter_bytes_per_s=1e6,
            run_s=0.0,
        )

    def choose(self, shape: TransferShape) -> TransferWay:
        assert shape.nbytes > 0
        assert 0 < shape.target_runs <= shape.descriptors
        return self.rng.choice([TransferWay.DIRECT, TransferWay.COLLATED])


@dataclass(slots=True, kw_only=True)
class AnyWorth(RestoreCost):
    """Says now that all is worth being fetched, now that only a part is."""

    rng: random.Random

    def worth(self, host_blocks: int, disk_blocks: int) -> int:
        everything = host_blocks + disk_blocks
        return self.rng.choice([everything, everything, everything, host_blocks, 0])

    def prefers(self, way: Rate, blocks: int, host_blocks: int, disk_blocks: int) -> bool:
        return self.rng.random() < 0.8


@dataclass(slots=True)
class _Histories:
    """Equal sequences have one name, so that comparing them is cheap."""

    names: dict[tuple[History | None, int], History] = field(default_factory=dict)
    parents: list[tuple[History | None, int]] = field(default_factory=list)

    def extend(self, chain: list[History], token_ids: Iterable[int]) -> list[History]:
        """The histories of a whole sequence, position by position."""
        chain = list(chain)
        for token in token_ids:
            place = (chain[-1] if chain else None, token)
            if place not in self.names:
                self.names[place] = History(len(self.parents))
                self.parents.append(place)
            chain.append(self.names[place])
        return chain

    def chain(self, last: History | None) -> list[History]:
        """Of each position of the sequence that ends with `last`."""
        found = []
        while last is not None:
            found.append(last)
            last = self.parents[last][0]
        return found[::-1]

    def token_ids(self, chain: list[History]) -> tuple[int, ...]:
        return tuple(self.parents[history][1] for history in chain)


HISTORIES = _Histories()


def right_token(prompt: tuple[int, ...], choice: int, emitted: tuple[int, ...]) -> int:
    """The hash model: what follows, for one choice."""
    state = 17 + 31 * choice
    for token in (*prompt, *emitted):
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return (state >> 33) % VOCABULARY


_BEGINNING = tuple(random.Random(0).randrange(VOCABULARY) for _ in range(30))


def make_spec(rng: random.Random, number: int, longest: int = 40) -> RequestSpec:
    """Prompts share some of their beginnings, blocks and parts of blocks. Some want a pace that
    others step back for."""
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest)))
    prompt = (*_BEGINNING[: min(number * 7 % 30, len(prompt))], *prompt[number * 7 % 30 :])
    sampling = Sampling(
        max_tokens=rng.randint(1, 12),
        seed=number,
        n=rng.choice([1, 1, 1, 2, 3]),
        stop_token_ids=(rng.randrange(VOCABULARY),),
    )
    return RequestSpec(
        key=RequestKey(f"r{number}", 0),
        prompt_ids=prompt,
        sampling=sampling,
        qos_tier=TIERS.tiers[number % 3].name,
        tpot_s=(None, 0.035, 0.1)[number // 3 % 3],
    )


def expected(spec: RequestSpec, choice: int) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    while True:
        token = right_token(spec.prompt_ids, choice, tuple(tokens))
        tokens.append(token)
        if token in spec.sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) == spec.sampling.max_tokens:
            return tokens, FinishReason.LENGTH


@dataclass(slots=True)
class Memory:
    """What a real pool's slots would hold: # group, layer in it, slot |-> history there"""

    layout: KvLayout = LAYOUT
    slots: dict[tuple[int, int, int], History] = field(default_factory=dict)

    # --- steps ----------------------------------------------------------------------------------

    def begin(self, slices: tuple[SequenceSlice, ...]) -> Running:
        """Reads what the step's tokens depend on."""
        wholes = [
            HISTORIES.extend(self._chain(piece, piece.start), piece.token_ids) for piece in slices
        ]
        running = Running(memory=self, slices=slices, wholes=wholes)
        running.check_earlier()
        return running

    def _chain(self, piece: SequenceSlice, end: int) -> list[History]:
        """All tokens before `end`."""
        if end == 0:
            return []
        found = {self._read(piece.tables, group, layer, end - 1) for group, layer in self.layers()}
        assert len(found) == 1, f"the layers disagree about {piece.key}: {found}"
        chain = HISTORIES.chain(found.pop())
        assert len(chain) == end, "KV was overwritten"
        return chain

    def layers(self) -> Iterator[tuple[int, int]]:
        for group, spec in enumerate(self.layout.groups):
            for layer in range(len(spec.layers)):
                yield group, layer

    def check(self, tables: Tables, whole: list[History], start: int, end: int) -> None:
        """Every layer holds the right KV of what tokens from `start` on see before `end`."""
        for group, layer in self.layers():
            window = self.layout.groups[group].window
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                there = self._read(tables, group, layer, position)
                assert there == whole[position], (
                    f"KV was overwritten: {(group, layer, position, there)}"
                )

    def write(self, tables: Tables, group: int, layer: int, position: int, here: History) -> None:
        self.slots[group, layer, self._slot(tables, group, position)] = here

    def _read(self, tables: Tables, group: int, layer: int, position: int) -> History | None:
        return self.slots.get((group, layer, self._slot(tables, group, position)))

    def _slot(self, tables: Tables, group: int, position: int) -> int:
        return slot(tables[group], position, self.layout.block_size)

    def copy(self, copies: tuple[CopyPairs, ...]) -> None:
        size = self.layout.block_size
        for pairs in copies:
            for group, layer in self.layers():
                for source, target in pairs[group]:
                    for i in range(size):
                        if (group, layer, source * size + i) in self.slots:
                            kept = self.slots[group, layer, source * size + i]
                            self.slots[group, layer, target * size + i] = kept

    # --- transfers ------------------------------------------------------------------------------

    def digest(self, tables: Tables, span: TokenSpan) -> KvDigest:
        """As if the histories were all there is to tell."""
        there = [
            self._read(tables, group, layer, position)
            for group, layer in self.layers()
            for position in span.seen(self.layout.groups[group].window)
        ]
        told = [(float(-1 if history is None else history),) * SUMS for history in there]
        plane = PlaneDigest(norms=(1.0,) * len(told), sums=tuple(chain.from_iterable(told)))
        return KvDigest(start=span.start, planes=(plane,))

    def take(self, write: SlabWrite, side: Side) -> Content:
        places = _places(write, side, of_source=True)
        return [self.slots.get(place) for place in places]

    def put(self, write: SlabWrite, side: Side, content: Content) -> None:
        places = list(_places(write, side, of_source=False))
        assert len({*places}) == len(places), "a slot is written twice"
        for place, history in zip(places, content, strict=True):
            if history is None:
                self.slots.pop(place, None)
            else:
                self.slots[place] = history


@dataclass(slots=True)
class Running:
    """A step on the device: its layers are written one after another."""

    memory: Memory
    slices: tuple[SequenceSlice, ...]
    wholes: list[list[History]]
    written: int = 0  # layers of the model

    def check_earlier(self) -> None:
        for piece, whole in zip(self.slices, self.wholes, strict=True):
            self.memory.check(piece.tables, whole, piece.start, piece.start)

    def write_up_to(self, last: int) -> None:
        """The KV of all slices, of the layers up to this one of the model."""
        for group, layer in self.memory.layers():
            if self.written <= self.memory.layout.groups[group].layers[layer] <= last:
                self._write(group, layer)
        self.written = last + 1

    def _write(self, group: int, layer: int) -> None:
        for piece, whole in zip(self.slices, self.wholes, strict=True):
            for position in range(piece.start, len(whole)):
                self.memory.write(piece.tables, group, layer, position, whole[position])

    def finish(self) -> tuple[tuple[Sampled, ...], ...]:
        self.write_up_to(max(layer for g in self.memory.layout.groups for layer in g.layers))
        for piece, whole in zip(self.slices, self.wholes, strict=True):
            self.memory.check(piece.tables, whole, piece.start, len(whole))
        return tuple(map(self._sample, self.slices, self.wholes))

    @staticmethod
    def _sample(piece: SequenceSlice, chain: list[History]) -> tuple[Sampled, ...]:
        whole = HISTORIES.token_ids(chain)
        ends = (len(whole) - wanted.index for wanted in piece.samples)
        return tuple(
            Sampled(token_id=right_token(whole[:end], wanted.choice, whole[end:]))
            for wanted, end in zip(piece.samples, ends, strict=True)
        )


def _places(write: SlabWrite, side: Side, *, of_source: bool) -> Iterator[tuple[int, int, int]]:
    """(group, layer, slot) of each (section, layer, token)."""
    for section in write.sections:
        part = section.part
        first = part.source_layer if of_source else part.target_layer
        for layer in range(first, first + part.layers):
            for token in range(section.start, section.start + section.tokens):
                yield part.group, layer, slot(side.tables[part.group], token, side.block_size)


def slot(table: Sequence[int], position: int, block_size: int) -> int:
    block = table[position // block_size]
    assert block != NO_BLOCK, f"no block is held for position {position}"
    return block * block_size + position % block_size
