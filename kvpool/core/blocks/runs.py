"""The cached prefixes of one tier: a prefix tree whose edges are runs of blocks. Pure.

A *run* is consecutive blocks that were always seen together. It has one holder count and one place
in the eviction order. It is split where prompts diverge, or where a holder holds only its
beginning.

    absent --append--> held --release (last holder)--> idle --evict, from its end--> absent
                        ^------------hold--------------'

A holder of a block holds its whole chain. So a parent is never idle before its children, never used
less often, and outlives them: eviction takes leaves first without searching for one.

A hash covers all tokens up to its block's end: where it is equal at one depth, all blocks before
are equal. So runs are compared at few depths. A block's depth is its index in its chain.

A *strand* is what was appended in one go, and grew at its end: the pieces of a split run share its
number. Since leaves go first, a strand is always one range of depths, and only its end moves.
Numbers are never used again, and a strand's parent has a smaller one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvpool.core.blocks.news import ROOT, Strand
from kvpool.core.layout.hashes import HASH_BYTES, BlockHash, Names

Columns = tuple["array[int]", ...]
"""Arrays with one entry for each block of a run, such as its slots."""


@dataclass(slots=True, eq=False)
class Run:
    """`start` is the depth of its first block. `holders` count the requests that need it, `uses`
    those that found or computed it. `tenant` is a label for reports; `idle_since` belongs to the
    eviction policy."""

    parent: Run | None = field(repr=False)
    start: int
    hashes: bytearray = field(repr=False)
    columns: Columns
    number: int
    tenant: str = ""
    holders: int = 1
    uses: int = 1
    idle_since: int = 0
    children: dict[bytes, Run] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.hashes) // HASH_BYTES

    @property
    def first(self) -> BlockHash:
        return BlockHash(bytes(self.hashes[:HASH_BYTES]))

    def at(self, depth: int) -> BlockHash:
        """The hash of the block at that depth of the chain."""
        first = (depth - self.start) * HASH_BYTES
        return BlockHash(bytes(self.hashes[first : first + HASH_BYTES]))


class RunPolicy(Protocol):
    """Holds exactly the idle runs of one tree, in the order in which they may be evicted."""

    def __contains__(self, run: Run, /) -> bool: ...

    def remembers(self, block_hash: BlockHash, /) -> bool:
        """True if a run that begins with this block was evicted a short time ago."""

    def cached(self, run: Run) -> None:
        """The run is new, and held. A policy that remembers it may raise its uses, but not above
        those of its parent."""

    def idle(self, runs: Sequence[Run]) -> None:
        """The last holder of each has released it, in this order: from leaves to the root."""

    def reused(self, run: Run) -> None:
        """An idle run is held again, or the beginning that was split from it is."""

    def victim(self) -> Run:
        """The run from whose end to evict now. At least one run is idle."""

    def evicted(self, run: Run, blocks: int) -> None:
        """So many blocks go from the end of this run now; it is idle no longer if all go."""


class Evicted(NamedTuple):
    """Blocks that are gone from the end of a run, parents first. `end` is the strand's end now."""

    number: int
    end: int
    hashes: bytes
    columns: Columns
    tenant: str


class RunTree:
    """It counts blocks, not memory: the owner of the tier's memory evicts, and gets the columns of
    the evicted blocks back."""

    def __init__(self, policy: RunPolicy) -> None:
        self._policy = policy
        self._roots: dict[bytes, Run] = {}
        self._tails: dict[int, Run] = {}  # strand |-> its last run
        self._numbers = 0
        self.blocks = 0
        self.idle = 0
        """Blocks without a holder: what can be evicted."""

    def __iter__(self) -> Iterator[Run]:
        """Parents before their children."""
        waiting = list(self._roots.values())
        while waiting:
            run = waiting.pop()
            yield run
            waiting += run.children.values()

    # --- finding --------------------------------------------------------------------------------

    def find(self, names: Names) -> tuple[Run | None, int]:
        """The longest cached prefix of the chain: the run that has its last block, and its number
        of blocks. Changes nothing."""
        run, depth, most = None, 0, len(names)
        children = self._roots
        while depth < most and (child := children.get(names.at(depth))) is not None:
            run, depth = child, common_end(names, child.hashes, depth)
            if depth < run.end:
                break
            children = run.children
        return run, depth

    def child(self, parent: Run | None, block_hash: BlockHash) -> Run | None:
        """The run below the end of `parent` that begins with this block."""
        return self._below(parent).get(block_hash)

    def _below(self, parent: Run | None) -> dict[bytes, Run]:
        return self._roots if parent is None else parent.children

    # --- holding --------------------------------------------------------------------------------

    def hold(self, run: Run, depth: int, *, used: bool = True) -> Run:
        """Holds the chain's first `depth` blocks; `run` has the last of them. Returns the run that
        ends there."""
        end = self._ending_at(run, depth)
        for part in path(end):
            self._hold(part)
            part.uses += used
        return end

    def hold_next(self, run: Run, depth: int) -> Run:
        """Holds one more run, up to `depth`, below a chain that the caller holds."""
        end = self._ending_at(run, depth)
        self._hold(end)
        above = end.parent
        # Who released this part of the chain alone uses it twice, and its parent once.
        end.uses = min(end.uses + 1, above.uses) if above is not None else end.uses + 1
        return end

    def _hold(self, run: Run) -> None:
        if not run.holders:
            self._policy.reused(run)
            self.idle -= run.blocks
        run.holders += 1

    def _ending_at(self, run: Run, depth: int) -> Run:
        """The run that ends at `depth`, where `run` has the last block before it; it may be split
        for that."""
        assert run.start < depth <= run.end, (run.start, depth, run.end)
        return run if depth == run.end else self._split(run, depth)

    def _split(self, run: Run, depth: int) -> Run:
        """Returns the new run above. `run` becomes the lower part: who points to it still means the
        same end."""
        blocks = depth - run.start
        upper = Run(
            parent=run.parent,
            start=run.start,
            hashes=run.hashes[: blocks * HASH_BYTES],
            columns=tuple(column[:blocks] for column in run.columns),
            number=run.number,
            tenant=run.tenant,
            holders=run.holders,
            uses=run.uses,
            idle_since=run.idle_since,
        )
        self._below(run.parent)[upper.first] = upper
        del run.hashes[: blocks * HASH_BYTES]
        for column in run.columns:
            del column[:blocks]
        upper.children[run.first] = run
        run.parent, run.start = upper, depth
        return upper

    def release(self, run: Run) -> None:
        """Releases the held chain that ends with `run`; its blocks stay cached."""
        idle: list[Run] = []
        for part in path(run):
            assert part.holders, "released twice"
            part.holders -= 1
            if not part.holders:
                self.idle += part.blocks
                idle.append(part)
        if idle:
            self._policy.idle(idle)

    # --- growing and evicting -------------------------------------------------------------------

    def append(self, parent: Run | None, hashes: bytes, columns: Columns, tenant: str = "") -> Run:
        """New blocks below the held chain that ends with `parent`; none of them is a child of it.
        From now on the caller holds the chain that ends with the returned run, and no longer the
        one that ended with `parent`."""
        self.blocks += len(hashes) // HASH_BYTES
        if parent is not None and self._grows(parent, hashes):
            parent.hashes += hashes
            for column, more in zip(parent.columns, columns, strict=True):
                column.extend(more)
            return parent
        return self._add(parent, hashes, columns, tenant)

    def _grows(self, run: Run, hashes: bytes) -> bool:
        """Nobody else has seen the run without these blocks."""
        is_own = run.holders == 1 and run.uses == 1 and not run.children
        return is_own and not self._policy.remembers(BlockHash(hashes[:HASH_BYTES]))

    def _add(self, parent: Run | None, hashes: bytes, columns: Columns, tenant: str) -> Run:
        assert parent is None or parent.holders, "the chain must be held"
        self._numbers += 1
        run = Run(
            parent=parent,
            start=parent.end if parent is not None else 0,
            hashes=bytearray(hashes),
            columns=columns,
            number=self._numbers,
            tenant=parent.tenant if parent is not None else tenant,
        )
        below = self._below(parent)
        assert run.first not in below, "the block is here already"
        below[run.first] = run
        self._tails[run.number] = run
        self._policy.cached(run)
        return run

    def evict(self, blocks: int) -> list[Evicted]:
        """Evicts that many of the idle blocks."""
        assert blocks <= self.idle, f"{blocks} of {self.idle} idle blocks"
        found: list[Evicted] = []
        while blocks > 0:
            run = self._policy.victim()
            some = min(blocks, run.blocks)
            self._policy.evicted(run, some)
            found.append(self._cut(run, some))
            blocks -= some
        return found

    def _cut(self, run: Run, blocks: int) -> Evicted:
        assert not run.children and not run.holders, "only idle leaves are evicted"
        kept = run.blocks - blocks
        columns = tuple(column[kept:] for column in run.columns)
        hashes = bytes(run.hashes[kept * HASH_BYTES :])
        gone = Evicted(run.number, run.start + kept, hashes, columns, run.tenant)
        self.blocks -= blocks
        self.idle -= blocks
        if not kept:
            self._remove(run)
            return gone
        del run.hashes[kept * HASH_BYTES :]
        for column in run.columns:
            del column[kept:]
        return gone

    def _remove(self, run: Run) -> None:
        del self._below(run.parent)[run.first]
        if run.parent is not None and run.parent.number == run.number:
            self._tails[run.number] = run.parent
        else:
            del self._tails[run.number]

    # --- strands --------------------------------------------------------------------------------

    def strands(self) -> Iterator[int]:
        """In the order of their numbers: parents before their children."""
        return iter(self._tails)

    def strand(self, number: int) -> Strand | None:
        tail = self._tails.get(number)
        if tail is None:
            return None
        first = self._pieces(tail)[-1]
        parent = first.parent.number if first.parent is not None else ROOT
        return Strand(parent, first.start, tail.end)

    def run_before(self, number: int, depth: int) -> Run:
        """The run of the strand that has the last block before `depth`."""
        run = self._tails[number]
        while run.start >= depth:
            assert run.parent is not None
            run = run.parent
        return run

    def hashes(self, number: int, start: int, end: int) -> bytes:
        """The packed hashes of a strand's blocks from depth `start` to before `end`."""
        found: list[bytes] = []
        for run in reversed(self._pieces(self._tails[number])):
            first, last = max(start - run.start, 0), max(end - run.start, 0)
            found.append(bytes(run.hashes[first * HASH_BYTES : last * HASH_BYTES]))
        return b"".join(found)

    @staticmethod
    def _pieces(tail: Run) -> list[Run]:
        """The runs of the strand that ends with `tail`, from the end."""
        pieces = [tail]
        while (above := pieces[-1].parent) is not None and above.number == tail.number:
            pieces.append(above)
        return pieces

    def validate(self) -> None:
        """Every block is held or idle. Every parent is cached, and is held and used at least as
        often as its children."""
        blocks = idle = 0
        for run in self:
            assert run.blocks and all(len(column) == run.blocks for column in run.columns)
            assert run.uses > 0 and (run in self._policy) == (not run.holders), run.number
            blocks += run.blocks
            idle += 0 if run.holders else run.blocks
            assert run.holders >= sum(child.holders for child in run.children.values())
            for first, child in run.children.items():
                assert child.parent is run and child.start == run.end and child.first == first
                assert child.uses <= run.uses and child.number >= run.number
        assert (blocks, idle) == (self.blocks, self.idle)
        assert all(run.parent is None and run.start == 0 for run in self._roots.values())
        self._validate_strands()

    def _validate_strands(self) -> None:
        tails: dict[int, Run] = {}
        for run in self:
            assert run.number not in tails or tails[run.number] is run.parent, "a strand forks"
            tails[run.number] = run
        assert tails == self._tails


def path(run: Run | None) -> Iterator[Run]:
    """The runs of a chain, from its end to its start."""
    while run is not None:
        yield run
        run = run.parent


_NEAR_BLOCKS = 16


def common_end(names: Names, hashes: bytes | bytearray, start: int) -> int:
    """Up to which depth the chain `names` goes along these packed hashes, the first of which is its
    name at depth `start`. It asks for few names, and for none far behind the first different one,
    for it takes time to make names."""
    low, high, step = start + 1, min(start + len(hashes) // HASH_BYTES, len(names)), _NEAR_BLOCKS
    while low < high:
        probe = min(low + step, high)
        if not _is_at(hashes, probe - 1 - start, names.at(probe - 1)):
            high = probe - 1
            break
        low, step = probe, 2 * step
    while low < high:
        probe = (low + high + 1) // 2
        same = _is_at(hashes, probe - 1 - start, names.at(probe - 1))
        low, high = (probe, high) if same else (low, probe - 1)
    return low


def _is_at(hashes: bytes | bytearray, index: int, block_hash: BlockHash) -> bool:
    return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES] == block_hash
