"""Which prefixes are known, and which holder's tier has them: one tree of runs. Pure.

A run is an edge of the tree: consecutive blocks, split where sequences diverge. A hash covers all
tokens up to its block's end: if two sequences have the same hash at some depth, all hashes before
it are the same too. The depth of a block is its index in its sequence. A holder's tier is a bit. It
has all of a run, or only its beginning, or nothing; and if it has some of a run, it has all of the
run's parent.

    on a split the upper part is a new run; the lower part is the run that was there

So a reference to a run stays right for whoever has the run's last block. Who has less finds his
last block in the run or above it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.core.layout.hashes import HASH_BYTES

GROWN_BYTES = 4096 * HASH_BYTES
"""Hashes of a run that still grows in place: appending copies them."""
RUN_BYTES = 360
"""Of a run without its blocks: 230 to 400 measured, the most where each run has one child."""


class KnownRun:
    """The blocks at depths [start, end) of a sequence. `full`: the bits that have all of it.
    `ends`: # bit that has only its beginning |-> the depth where that ends.

    A run that left the tree has no block and no bit. It still has its parent.
    """

    __slots__ = ("children", "ends", "full", "hashes", "newer", "older", "parent", "start")

    def __init__(self, hashes: bytes, start: int, parent: KnownRun | None) -> None:
        self.hashes = hashes
        self.start = start
        self.parent = parent or self  # the root's is the root
        self.full = 0
        self.ends: dict[int, int] | None = None
        self.children: dict[bytes, KnownRun] | None = None
        # In the order of use; the root closes the ring.
        self.older = self.newer = self

    @property
    def blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.hashes) // HASH_BYTES

    def has(self, bit: int) -> bool:
        """At least its first block."""
        return bool(self.full & bit) or (self.ends is not None and bit in self.ends)

    def end_of(self, bit: int) -> int:
        """The depth up to which `bit`, which has some of it, has it."""
        return self.ends[bit] if self.ends and bit in self.ends else self.end

    def hold(self, bit: int, end: int) -> None:
        """`bit` has it at least up to here."""
        if self.full & bit:
            return
        if end == self.end:
            self._leave_ends(bit)
            self.full |= bit
        elif self.ends is None:
            self.ends = {bit: end}
        else:
            self.ends[bit] = max(end, self.ends.get(bit, 0))

    def cut(self, bit: int, end: int) -> None:
        """`bit` has it no further than here."""
        if self.has(bit) and end < self.end_of(bit):
            self.leave(bit)
            self.hold(bit, end)

    def leave(self, bit: int) -> None:
        """`bit` has nothing of it."""
        self.full &= ~bit
        self._leave_ends(bit)

    def _leave_ends(self, bit: int) -> None:
        if self.ends is not None:
            self.ends.pop(bit, None)
            self.ends = self.ends or None

    def child(self, first: bytes) -> KnownRun | None:
        return self.children.get(first) if self.children else None

    def same(self, depth: int, hashes: bytes, at: int) -> int:
        """How many blocks from `depth` on equal those in `hashes` from byte `at` on."""
        here = (depth - self.start) * HASH_BYTES
        most = min(len(self.hashes) - here, len(hashes) - at) // HASH_BYTES

        def equal(blocks: int) -> bool:
            """The last of so many blocks is equal, so all of them are."""
            last = (blocks - 1) * HASH_BYTES
            mine = self.hashes[here + last : here + last + HASH_BYTES]
            return mine == hashes[at + last : at + last + HASH_BYTES]

        if not most or equal(most):
            return most
        low = 0
        while most - low > 1:
            middle = (low + most) // 2
            low, most = (middle, most) if equal(middle) else (low, middle)
        return low


class KnownRuns:
    """The tree. It has no block that nobody has.

    Runs are in the order of their last use, and a use of a run is one of its parents too. So the
    oldest is always a leaf.
    """

    def __init__(self) -> None:
        self.root = KnownRun(b"", 0, None)
        self.root.full = -1
        self.runs = 0
        self.blocks = 0

    # --- what holders have ----------------------------------------------------------------------

    def store(
        self, bit: int, above: KnownRun, depth: int, hashes: bytes, *, grows: bool
    ) -> KnownRun:
        """`bit`, which has `above` up to this depth, has these blocks below it. Returns the run of
        the last one. If nothing but the blocks of one strand of `bit` lies in `above`, and `grows`
        is true, the run may grow in place."""
        run, at = above, 0
        while at < len(hashes):
            if depth == run.end:
                child = run.child(hashes[at : at + HASH_BYTES])
                if child is None:
                    run = self._append(bit, run, hashes[at:], grows=grows)
                    break
                run = child
            same = run.same(depth, hashes, at)
            depth, at = depth + same, at + same * HASH_BYTES
            run.hold(bit, depth)
            if at < len(hashes) and depth < run.end:
                run = self._split(run, depth)
        self.use(run)
        return run

    def _append(self, bit: int, run: KnownRun, hashes: bytes, *, grows: bool) -> KnownRun:
        self.blocks += len(hashes) // HASH_BYTES
        if grows and run.full == bit and not run.children and len(run.hashes) < GROWN_BYTES:
            run.hashes += hashes
            return run
        new = KnownRun(hashes, run.end, run)
        new.full = bit
        self._add(new, run)
        return new

    def _add(self, new: KnownRun, parent: KnownRun) -> None:
        children = parent.children
        if children is None:
            children = parent.children = {}
        children[new.hashes[:HASH_BYTES]] = new
        self.runs += 1

    def _split(self, run: KnownRun, depth: int) -> KnownRun:
        """Returns the new run, which ends at `depth`; the other one begins there."""
        at = (depth - run.start) * HASH_BYTES
        upper = KnownRun(run.hashes[:at], run.start, run.parent)
        upper.children = {run.hashes[at : at + HASH_BYTES]: run}
        upper.full = run.full
        run.hashes, run.start, run.parent = run.hashes[at:], depth, upper
        ends, run.ends = run.ends or {}, None
        for bit, end in ends.items():
            upper.hold(bit, min(end, depth))
            if end > depth:
                run.hold(bit, end)
        self._add(upper, upper.parent)
        return upper

    def cut(self, bit: int, run: KnownRun, end: int) -> KnownRun:
        """`bit` has nothing from this depth on of what leads to `run`, of which it has some.
        Returns the run of its last block."""
        while run.start >= end and run is not self.root:
            run, left = run.parent, run
            left.leave(bit)
            self._leave(left)
        if run is not self.root:
            run.cut(bit, end)
            self._leave(run)
        return run

    def lose(self, bit: int, run: KnownRun, begin: int) -> None:
        """`bit` has nothing of what leads to `run`, but for runs that end before `begin`."""
        while run.end > begin:
            run, left = run.parent, run
            left.leave(bit)
            self._leave(left)

    # --- leaving --------------------------------------------------------------------------------

    def _leave(self, run: KnownRun) -> None:
        """A bit has left it. What nobody has leaves the tree, also above it."""
        while run.hashes and not (run.full or run.ends or run.children):
            self._remove(run)
            run = run.parent
        if run.hashes and not (run.full or run.children):
            self._trim(run)

    def _trim(self, run: KnownRun) -> None:
        """It ends where the last bit that has some of it ends."""
        assert run.ends
        end = max(run.ends.values())
        self.blocks -= run.end - end
        run.hashes = run.hashes[: (end - run.start) * HASH_BYTES]
        for bit in [bit for bit, one in run.ends.items() if one == end]:
            run.hold(bit, end)

    def _remove(self, run: KnownRun) -> None:
        children = run.parent.children
        assert children is not None and children[run.hashes[:HASH_BYTES]] is run
        del children[run.hashes[:HASH_BYTES]]
        run.parent.children = children or None
        self.runs -= 1
        self.blocks -= run.blocks
        _take_out(run)
        del run.older, run.newer  # a run that refers to itself would wait for the garbage collector
        run.hashes, run.full, run.ends = b"", 0, None

    def drop_oldest(self) -> int:
        """There is one. Returns the bits that had some of it."""
        run = self.root.newer
        assert not run.children and run is not self.root
        bits = run.full
        for bit in run.ends or ():
            bits |= bit
        self._remove(run)
        return bits

    # --- the order of use -----------------------------------------------------------------------

    def use(self, run: KnownRun) -> None:
        """With all that lead to it."""
        while run is not self.root:
            _take_out(run)
            _insert_behind(self.root.older, run)
            run = run.parent

    def __iter__(self) -> Iterator[KnownRun]:
        """The oldest first."""
        run = self.root.newer
        while run is not self.root:
            yield run
            run = run.newer

    def validate(self) -> None:
        seen: set[int] = {id(self.root)}
        runs = [*self]
        for run in reversed(runs):
            assert id(run.parent) in seen, f"{run.start} is younger than its parent, or without one"
            seen.add(id(run))
            _check(run)
        assert self.runs == len(runs), f"{self.runs} runs, and {len(runs)} in the order"
        assert self.blocks == sum(run.blocks for run in runs), f"{self.blocks} blocks"
        below = sum(len(run.children or ()) for run in [self.root, *runs])
        assert below == len(runs), f"{below} children of {len(runs)} runs"


def _check(run: KnownRun) -> None:
    parent = run.parent
    assert run.blocks and len(run.hashes) % HASH_BYTES == 0, f"{len(run.hashes)} bytes"
    assert run.start == parent.end, f"it begins at {run.start}, its parent ends at {parent.end}"
    assert parent.child(run.hashes[:HASH_BYTES]) is run, "its parent doesn't know it"
    assert run.full, "nobody has all of it"
    assert run.children is None or run.children, "an empty dictionary"
    bits = run.full
    for bit, end in (run.ends or {}).items():
        assert run.start < end < run.end, f"{end} in [{run.start}, {run.end})"
        assert not run.full & bit, "it has all and not all"
        bits |= bit
    assert bits & parent.full == bits, "who has some of it lacks some of its parent"


def _take_out(run: KnownRun) -> None:
    run.older.newer, run.newer.older = run.newer, run.older
    run.older = run.newer = run


def _insert_behind(older: KnownRun, run: KnownRun) -> None:
    run.older, run.newer = older, older.newer
    older.newer.older = run
    older.newer = run
