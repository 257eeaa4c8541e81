"""A model without a device: the next token is a hash of all before it, and KV is that history.

So a request's right tokens are known whatever the schedule, and wrong KV is noticed at once.
"""

from __future__ import annotations

import random
from collections import Counter
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
    states: list[tuple[int, int]] = field(default_factory=list)
    """Of the hash of choice 0, and what the hash of each further choice differs by."""
    chains: dict[History, list[History]] = field(default_factory=dict)

    def forget(self) -> None:
        for kept in (self.names, self.parents, self.states, self.chains):
            kept.clear()

    def extend(self, chain: list[History], token_ids: Iterable[int]) -> list[History]:
        """The histories of a whole sequence, position by position."""
        chain = list(chain)
        last = chain[-1] if chain else None
        for token in token_ids:
            found = self.names.get((last, token))
            last = self._add(last, token) if found is None else found
            chain.append(last)
        return chain

    def _add(self, parent: History | None, token: int) -> History:
        name = self.names[parent, token] = History(len(self.parents))
        state, step = (17, 31) if parent is None else self.states[parent]
        self.parents.append((parent, token))
        self.states.append(((state * _FACTOR + token + _SUMMAND) % 2**64, step * _FACTOR % 2**64))
        return name

    def chain(self, last: History) -> list[History]:
        """Of each position of the sequence that ends with `last`."""
        found = self.chains.get(last)
        if found is None:
            parent = self.parents[last][0]
            if len(self.chains) > _MOST_CHAINS:
                self.chains.clear()
            before = [] if parent is None else self.chain(parent)
            found = self.chains[last] = [*before, last]
        return found

    def token_ids(self, chain: list[History]) -> tuple[int, ...]:
        return tuple([self.parents[history][1] for history in chain])

    def next_token(self, last: History, choice: int) -> int:
        """The hash model: what follows, for one choice."""
        state, step = self.states[last]
        return ((state + choice * step) % 2**64 >> 33) % VOCABULARY


_FACTOR, _SUMMAND = 6364136223846793005, 1442695040888963407
_MOST_CHAINS = 10_000
HISTORIES = _Histories()


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
    last = HISTORIES.extend([], spec.prompt_ids)[-1]
    while True:
        token = HISTORIES.next_token(last, choice)
        (last,) = HISTORIES.extend([last], (token,))[1:]
        tokens.append(token)
        if token in spec.sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) == spec.sampling.max_tokens:
            return tokens, FinishReason.LENGTH


Row = list[History | None]
"""Of the tokens of one block, in one layer."""
Run = tuple[int, int, int, int]
"""block, first slot in it, slot behind the last one, position of the first"""


@dataclass(slots=True)
class Memory:
    """What a real pool's slots would hold. `rows`: # group, layer in it |-> block |-> row"""

    layout: KvLayout = LAYOUT
    rows: dict[tuple[int, int], dict[int, Row]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {
            (group, layer): {}
            for group, spec in enumerate(self.layout.groups)
            for layer in range(len(spec.layers))
        }

    def row(self, group: int, layer: int, block: int) -> Row:
        rows = self.rows[group, layer]
        found = rows.get(block)
        if found is None:
            found = rows[block] = [None] * self.layout.block_size
        return found

    # --- steps ----------------------------------------------------------------------------------

    def begin(self, slices: tuple[SequenceSlice, ...], last: int) -> Running:
        """Reads what the step's tokens depend on. The step before may still write layers behind
        the `last` one."""
        rows = [row for row in self.rows if self.model_layer(row) <= last]
        wholes = [
            HISTORIES.extend(self._chain(piece, piece.start, rows), piece.token_ids)
            for piece in slices
        ]
        running = Running(memory=self, slices=slices, wholes=wholes)
        for row in rows:
            running.check_earlier(row)
        return running

    def model_layer(self, row: tuple[int, int]) -> int:
        group, layer = row
        return self.layout.groups[group].layers[layer]

    def _chain(
        self, piece: SequenceSlice, end: int, rows: Iterable[tuple[int, int]]
    ) -> list[History]:
        """All tokens before `end`."""
        if end == 0:
            return []
        found = {self._read(piece.tables, group, layer, end - 1) for group, layer in rows}
        assert len(found) == 1, f"the layers disagree about {piece.key}: {found}"
        (last,) = found
        assert last is not None, "KV was overwritten"
        chain = HISTORIES.chain(last)
        assert len(chain) == end, "KV was overwritten"
        return chain

    def check(
        self, tables: Tables, whole: list[History], start: int, end: int, row: tuple[int, int]
    ) -> None:
        """This layer holds the right KV of what tokens from `start` on see before `end`."""
        group, layer = row
        window = self.layout.groups[group].window
        first = 0 if window is None else max(0, start - window + 1)
        for block, low, high, at in self.runs(tables[group], first, end):
            right, there = whole[at : at + high - low], self.row(group, layer, block)[low:high]
            assert there == right, f"KV was overwritten: {(group, layer, at, there)}"

    def write(self, tables: Tables, group: int, layer: int, whole: list[History], at: int) -> None:
        """The KV of the tokens from `at` on."""
        for block, low, high, position in self.runs(tables[group], at, len(whole)):
            self.row(group, layer, block)[low:high] = whole[position : position + high - low]

    def runs(self, table: Sequence[int], start: int, end: int) -> Iterator[Run]:
        """The parts of blocks in which the tokens [start, end) are."""
        size = self.layout.block_size
        while start < end:
            low = start % size
            high = min(size, low + end - start)
            block = table[start // size]
            assert block != NO_BLOCK, f"no block is held for position {start}"
            yield block, low, high, start
            start += high - low

    def _read(self, tables: Tables, group: int, layer: int, position: int) -> History | None:
        index, offset = divmod(position, self.layout.block_size)
        block = tables[group][index]
        assert block != NO_BLOCK, f"no block is held for position {position}"
        row = self.rows[group, layer].get(block)
        return None if row is None else row[offset]

    def copy(self, copies: tuple[CopyPairs, ...]) -> None:
        for pairs in copies:
            for group, layer in self.rows:
                for source, target in pairs[group]:
                    kept, row = self.row(group, layer, source), self.row(group, layer, target)
                    row[:] = [b if a is None else a for a, b in zip(kept, row, strict=True)]

    # --- transfers ------------------------------------------------------------------------------

    def digest(self, tables: Tables, span: TokenSpan) -> KvDigest:
        """As if the histories were all there is to tell."""
        there = [
            self._read(tables, group, layer, position)
            for group, layer in self.rows
            for position in span.seen(self.layout.groups[group].window)
        ]
        told = [(float(-1 if history is None else history),) * SUMS for history in there]
        plane = PlaneDigest(norms=(1.0,) * len(told), sums=tuple(chain.from_iterable(told)))
        return KvDigest(start=span.start, planes=(plane,))

    def take(self, write: SlabWrite, side: Side) -> Content:
        content: Content = []
        for group, layer, (block, low, high, _) in self._parts(write, side, of_source=True):
            content += self.row(group, layer, block)[low:high]
        return content

    def put(self, write: SlabWrite, side: Side, content: Content) -> None:
        done, written = 0, Counter[tuple[int, int, int]]()
        for group, layer, (block, low, high, _) in self._parts(write, side, of_source=False):
            slots = (1 << high) - (1 << low)
            assert not written[group, layer, block] & slots, "a slot is written twice"
            written[group, layer, block] |= slots
            self.row(group, layer, block)[low:high] = content[done : done + high - low]
            done += high - low
        assert done == len(content)

    def _parts(
        self, write: SlabWrite, side: Side, *, of_source: bool
    ) -> Iterator[tuple[int, int, Run]]:
        """Of each (section, layer)."""
        assert side.block_size == self.layout.block_size
        for section in write.sections:
            part = section.part
            first = part.source_layer if of_source else part.target_layer
            for layer in range(first, first + part.layers):
                table, end = side.tables[part.group], section.start + section.tokens
                for run in self.runs(table, section.start, end):
                    yield part.group, layer, run


@dataclass(slots=True)
class Running:
    """A step on the device: its layers are written one after another."""

    memory: Memory
    slices: tuple[SequenceSlice, ...]
    wholes: list[list[History]]
    written: int = 0  # layers of the model

    def check_earlier(self, row: tuple[int, int]) -> None:
        for piece, whole in zip(self.slices, self.wholes, strict=True):
            self.memory.check(piece.tables, whole, piece.start, piece.start, row)

    def write_up_to(self, last: int) -> None:
        """The KV of all slices, of the layers up to this one of the model."""
        for row in self.memory.rows:
            if self.written <= self.memory.model_layer(row) <= last:
                self.check_earlier(row)
                self._write(*row)
        self.written = max(self.written, last + 1)

    def _write(self, group: int, layer: int) -> None:
        for piece, whole in zip(self.slices, self.wholes, strict=True):
            self.memory.write(piece.tables, group, layer, whole, piece.start)

    def finish(self) -> tuple[tuple[Sampled, ...], ...]:
        self.write_up_to(max(layer for g in self.memory.layout.groups for layer in g.layers))
        for piece, whole in zip(self.slices, self.wholes, strict=True):
            for row in self.memory.rows:
                self.memory.check(piece.tables, whole, piece.start, len(whole), row)
        return tuple(map(self._sample, self.slices, self.wholes))

    @staticmethod
    def _sample(piece: SequenceSlice, chain: list[History]) -> tuple[Sampled, ...]:
        return tuple(
            [
                Sampled(token_id=HISTORIES.next_token(chain[-1], wanted.choice))
                for wanted in piece.samples
            ]
        )
