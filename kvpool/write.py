"""What travels at once from one rank's pool to another's, and where it lies at each end. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvpool.codec import Codec, WireFormat
from kvpool.layout import Tables
from kvpool.plan import TokenPlace, TokenRun, token_runs
from kvpool.reslice import GroupSlice
from kvrelay.values import value


@value
class TokenSpan:
    """Tokens `[start, start + tokens)` of a sequence whose next query is at `next_position`."""

    start: int
    tokens: int
    next_position: int

    def seen(self, window: int | None) -> range:
        """Those that the next query, or one after it, still sees; a window counts the query."""
        visible = 0 if window is None else self.next_position - window + 1
        end = self.start + self.tokens
        return range(min(max(self.start, visible), end), end)


@value
class Section:
    """One group's tokens `[start, start + tokens)` at `offset_bytes` of a slab's payload, laid out
    as `kvpool.codec` says. `last_layer` is the model's index of its last layer.
    """

    part: GroupSlice
    last_layer: int
    start: int
    tokens: int
    offset_bytes: int
    nbytes: int

    def encoded(self, wire: WireFormat, offset_bytes: int) -> Section:
        shape = [(plane.heads, plane.dim) for plane in self.part.planes]
        nbytes = wire.encoded_bytes(self.part.layers, self.tokens, shape)
        return replace(self, offset_bytes=offset_bytes, nbytes=nbytes)


@value
class Write:
    """One slab's payload: sections one after another, without gaps, all in one format."""

    sections: tuple[Section, ...]
    wire: WireFormat

    @property
    def nbytes(self) -> int:
        return sum([section.nbytes for section in self.sections])

    @property
    def last_layer(self) -> int:
        """The layer of the model after which a write that isn't empty may be gathered."""
        return max(section.last_layer for section in self.sections)

    def encoded(self, codec: Codec) -> Write:
        """The same tokens of the same layers with another codec. Where heads are tiny a codec may
        need more bytes than none does."""
        if codec is self.wire.codec:
            return self
        wire = replace(self.wire, codec=codec)
        sections: list[Section] = []
        for section in self.sections:
            offset_bytes = sum(before.nbytes for before in sections)
            sections.append(section.encoded(wire, offset_bytes))
        return Write(sections=tuple(sections), wire=wire)


@value
class Side:
    """Where the sequence lies in one rank's pool."""

    tables: Tables
    block_size: int

    def runs(self, section: Section) -> tuple[TokenRun, ...]:
        """The copies between pool and section, adjacent blocks merged; positions are from the
        section's first token."""
        return token_runs(*self.place(section))

    def place(self, section: Section) -> TokenPlace:
        """Of the table only what the section takes."""
        first, within = divmod(section.start, self.block_size)
        last = -(-(section.start + section.tokens) // self.block_size)
        table = self.tables[section.part.group][first:last]
        return table, within, section.tokens, self.block_size
