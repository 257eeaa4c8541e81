"""Who holds which block: the router's view, as workers and pool nodes report it. Pure.

Soft state: an entry that is missing or out of date costs a recomputation, never a wrong token,
for whoever is asked for a block answers by what it holds then. So nothing that a holder tells is an
error: a strand that doesn't fit what is known of the holder is ignored, with all strands below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import compress

from kvpool.core.blocks.runs import common_end
from kvpool.core.layout.hashes import HASH_BYTES, Names
from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, CutRun, PoolUpdate, StoredRun
from kvrelay.types import Incarnation, Tier
from router.core.state.known_runs import RUN_BYTES, KnownRun, KnownRuns

STRAND_BYTES = 140
"""Of a strand in a holder's tier: 100 to 140 measured."""
DIRECTORY_BYTES = 512 * 2**20
"""About 12 million blocks: the caches of 170 GPUs with 70,000 blocks each, if none is at two."""
_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


@dataclass(slots=True)
class _KnownStrand:
    """`run` has its last known block, or a run above does."""

    run: KnownRun
    begin: int


@dataclass(slots=True)
class _HolderTier:
    """One bit of the tree. `dropped`: runs of it that were dropped, since its strands were looked
    through."""

    holder: Incarnation
    tier: Tier
    bit: int
    strands: dict[int, _KnownStrand] = field(default_factory=dict)
    dropped: int = 0

    def end(self, strand: _KnownStrand) -> int:
        """The depth up to which the strand is known. Its `run` is exact then."""
        while not strand.run.has(self.bit):
            strand.run = strand.run.parent
        return strand.run.end_of(self.bit)


@dataclass(slots=True)
class Directory:
    """A holder is a worker or a host's pool node. `pool_nodes`: # node |-> its latest update.

    It takes about `most_bytes`. Beyond them, what was stored and looked up longest ago is dropped;
    `dropped_blocks` were, since the start. What was dropped is unknown until its holder stores it
    again.
    """

    most_bytes: int = DIRECTORY_BYTES
    dropped_blocks: int = 0
    pool_nodes: dict[Incarnation, PoolUpdate] = field(default_factory=dict)
    _runs: KnownRuns = field(default_factory=KnownRuns)
    _strands: int = 0
    _tiers: dict[Incarnation, dict[Tier, _HolderTier]] = field(default_factory=dict)
    _places: list[_HolderTier | None] = field(default_factory=list)  # place of the bit |-> its tier
    _holders: list[Incarnation] = field(default_factory=list)  # place of the bit |-> its holder

    @property
    def blocks(self) -> int:
        """Different ones."""
        return self._runs.blocks

    @property
    def used_bytes(self) -> int:
        """An estimate of the memory that it takes."""
        runs = self._runs
        return runs.blocks * HASH_BYTES + runs.runs * RUN_BYTES + self._strands * STRAND_BYTES

    # --- what holders tell ----------------------------------------------------------------------

    def updated(self, update: PoolUpdate) -> None:
        """A pool node's stream begins with number 0. Raises PeerError, and has forgotten the node,
        when the update before this one is missing."""
        node = self.pool_nodes.get(update.node)
        expected = node.sequence + 1 if node is not None else 0
        if update.sequence != expected:
            self.lost(update.node)
        if update.sequence not in (0, expected):
            raise PeerError(f"update {update.sequence} came in the place of {expected}")
        self.pool_nodes[update.node] = replace(update, blocks=())
        for changes in update.blocks:
            self.changed(update.node, changes)

    def changed(self, holder: Incarnation, changes: BlockChanges) -> None:
        tier = self._tiers.get(holder, {}).get(changes.tier) or self._add(holder, changes.tier)
        for cut in changes.cut:
            self._cut(tier, cut)
        for stored in changes.stored:
            self._store(tier, stored)
        while self.used_bytes > self.most_bytes and self._runs.runs:
            self._drop_oldest()

    def _add(self, holder: Incarnation, tier: Tier) -> _HolderTier:
        place = self._places.index(None) if None in self._places else len(self._places)
        new = _HolderTier(holder, tier, 1 << place)
        self._places[place : place + 1] = [new]
        self._holders[place : place + 1] = [holder]
        self._tiers.setdefault(holder, {})[tier] = new
        return new

    def _cut(self, tier: _HolderTier, cut: CutRun) -> None:
        strand = tier.strands.get(cut.number)
        if strand is None:
            return
        end = max(cut.end, strand.begin)
        if end < tier.end(strand):
            strand.run = self._runs.cut(tier.bit, strand.run, end)
        if end == strand.begin:
            del tier.strands[cut.number]
            self._strands -= 1

    def _store(self, tier: _HolderTier, told: StoredRun) -> None:
        strand = tier.strands.get(told.number)
        if told.parent != told.number:
            if strand is None and told.hashes:
                self._begin(tier, told)
        elif strand is not None and strand.begin < told.start == tier.end(strand):
            strand.run = self._runs.store(tier.bit, strand.run, told.start, told.hashes, grows=True)

    def _begin(self, tier: _HolderTier, told: StoredRun) -> None:
        above = self._above(tier, told)
        if above is not None:
            run = self._runs.store(tier.bit, above, told.start, told.hashes, grows=False)
            tier.strands[told.number] = _KnownStrand(run, told.start)
            self._strands += 1

    def _above(self, tier: _HolderTier, told: StoredRun) -> KnownRun | None:
        """The run of the block before it. None: it is unknown."""
        if not told.parent:
            return self._runs.root if not told.start else None
        parent = tier.strands.get(told.parent)
        if parent is None or not parent.begin < told.start <= tier.end(parent):
            return None
        run = parent.run
        while run.start >= told.start:
            run = run.parent
        return run

    def lost(self, holder: Incarnation) -> None:
        """It may not have been there."""
        self.pool_nodes.pop(holder, None)
        for tier in self._tiers.pop(holder, {}).values():
            for strand in tier.strands.values():
                self._runs.lose(tier.bit, strand.run, strand.begin)
            self._strands -= len(tier.strands)
            self._places[tier.bit.bit_length() - 1] = None

    def node_of(self, worker: Incarnation) -> PoolUpdate | None:
        """The pool node of its host."""
        return next((node for node in self.pool_nodes.values() if worker in node.workers), None)

    # --- its bound ------------------------------------------------------------------------------

    def _drop_oldest(self) -> None:
        before = self._runs.blocks
        bits = self._runs.drop_oldest()
        self.dropped_blocks += before - self._runs.blocks
        for tier in compress(self._places, _selected(bits)):
            assert tier is not None, "a bit that nobody has"
            tier.dropped += 1
            if tier.dropped > len(tier.strands) // 4:
                self._look_through(tier)

    def _look_through(self, tier: _HolderTier) -> None:
        """Strands of which nothing is known are forgotten."""
        before, tier.dropped = len(tier.strands), 0
        tier.strands = {
            number: one for number, one in tier.strands.items() if tier.end(one) > one.begin
        }
        self._strands -= before - len(tier.strands)

    # --- looking up -----------------------------------------------------------------------------

    def longest(self, names: Names) -> dict[Incarnation, int]:
        """# holder |-> how many of the chain's first blocks it has in one tier, at most; only those
        with any. It asks for few more names than somebody has."""
        found: dict[Incarnation, int] = {}
        run, having, reached = self._runs.root, -1, 0
        while having and reached == run.end and reached < len(names):
            child = run.child(names.at(reached))
            if child is None:
                break
            run, reached = child, common_end(names, child.hashes, reached)
            having = self._go_on(found, run, having, reached)
        self._runs.use(run)
        if having > 0:
            self._note(found, having, reached)
        return found

    def _go_on(
        self, found: dict[Incarnation, int], run: KnownRun, having: int, reached: int
    ) -> int:
        """Of the bits `having` all of the run's parent, those that have all of this run. Notes how
        far the others go."""
        still = having & run.full
        if run.start and still != having:
            self._note(found, having & ~still, run.start)
        for bit, end in (run.ends or {}).items():
            if bit & having:
                holder = self._holders[bit.bit_length() - 1]
                found[holder] = max(found.get(holder, 0), min(end, reached))
        return still

    def _note(self, found: dict[Incarnation, int], bits: int, length: int) -> None:
        """No length was greater yet."""
        found |= dict.fromkeys(compress(self._holders, _selected(bits)), length)

    def validate(self) -> None:
        self._runs.validate()
        tiers = [one for tiers in self._tiers.values() for one in tiers.values()]
        assert self._strands == sum(len(tier.strands) for tier in tiers)
        assert len(tiers) == len(self._places) - self._places.count(None)
        assert self.used_bytes <= self.most_bytes or not self._runs.runs
        assert all(update.node == node for node, update in self.pool_nodes.items())
        found: dict[int, int] = {}  # run |-> bits of the strands that lead through it
        for tier in tiers:
            place = tier.bit.bit_length() - 1
            assert tier.bit == 1 << place and self._places[place] is tier
            assert self._holders[place] == tier.holder
            for run in _covered(self._runs, tier):
                found[id(run)] = found.get(id(run), 0) | tier.bit
        for run in self._runs:
            bits = run.full | sum(run.ends or ())
            assert found.get(id(run), 0) == bits, "a bit without its strand"


def _covered(runs: KnownRuns, tier: _HolderTier) -> Iterator[KnownRun]:
    """The runs that its strands lead through, some of them often."""
    for strand in tier.strands.values():
        run = strand.run
        while run is not runs.root:
            if run.has(tier.bit):
                yield run
            run = run.parent


def _selected(bits: int) -> bytes:
    """For each place, whether the bit is set."""
    return f"{bits:b}"[::-1].encode().translate(_DIGITS)
