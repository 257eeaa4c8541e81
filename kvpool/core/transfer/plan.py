"""Cuts the KV that travels from one rank's pool to another's into slabs. Pure.

The cut depends on the two layouts and the tokens alone, never on block tables. So both workers
reach the same cut, and each plans only its own copies. Groups with a window send only the KV that
the window still shows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from kvpool.core.layout.codec import Codec, WireFormat
from kvpool.core.layout.layout import Tables
from kvpool.core.layout.shards import GroupSlice, ShardLayout, reslice
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite, TokenSpan
from kvrelay.errors import ConfigError

WRITE_TOKENS = 128
"""Writes of fewer tokens cost more per byte than they save in waiting."""

_GRAIN_TOKENS = 16
"""Sections begin and end at multiples of this where possible. So whole blocks are copied if a block
has this many tokens or a multiple. The block size of a worker must not matter, because both workers
cut alike."""


def least_tokens(seen: range) -> int:
    """The smallest piece size with which pieces of `seen` all have 128 tokens (or all of them)."""
    lead, grains = _grains(seen)
    count = max(1, (len(seen) - lead) // WRITE_TOKENS)
    return min(len(seen), lead + -(-grains // count) * _GRAIN_TOKENS)


def token_pieces(seen: range, most: int) -> list[range]:
    """The fewest pieces of at most `most` tokens, made of whole grains except at the ends of
    `seen`, and otherwise even. If these would be small, pieces of any number of tokens."""
    lead, grains = _grains(seen)
    fit = (most - lead) // _GRAIN_TOKENS
    if len(seen) > most and fit > 0:
        parts = even_pieces(range(grains), fit)
        ends = [0, *(min(lead + part.stop * _GRAIN_TOKENS, len(seen)) for part in parts)]
        pieces = [seen[start:end] for start, end in pairwise(ends)]
        if min(map(len, pieces)) >= WRITE_TOKENS:
            return pieces
    return list(even_pieces(seen, most))


def _grains(seen: range) -> tuple[int, int]:
    """Tokens before the first grain, and the number of grains from there on."""
    lead = -seen.start % _GRAIN_TOKENS
    return lead, max(1, -(-(len(seen) - lead) // _GRAIN_TOKENS))


def even_pieces(whole: range, most: int) -> Iterator[range]:
    """The fewest pieces of at most `most`, whose sizes differ by one at most."""
    return split(whole, -(-len(whole) // most))


def split(whole: range, count: int) -> Iterator[range]:
    for i in range(count):
        yield whole[len(whole) * i // count : len(whole) * (i + 1) // count]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Gather each write's sections by `source.runs`, move it, scatter by `target.runs`."""

    writes: tuple[SlabWrite, ...]
    source: Side
    target: Side

    @property
    def nbytes(self) -> int:
        return sum(write.nbytes for write in self.writes)


def plan(
    src_blocks: Tables,
    dst_blocks: Tables,
    src_layout: ShardLayout,
    dst_layout: ShardLayout,
    *,
    span: TokenSpan,
    staging_bytes: int,
    layer_groups: int = 1,
    codec: Codec = Codec.NONE,
    wire_dtype: str | None = None,
) -> TransferPlan:
    """Moves `span` from one rank to another; each target slot that needs it is written once.

    Options and errors are those of `cut`.
    """
    writes = cut(
        src_layout,
        dst_layout,
        span=span,
        staging_bytes=staging_bytes,
        layer_groups=layer_groups,
        codec=codec,
        wire_dtype=wire_dtype,
    )
    return TransferPlan(
        writes=writes,
        source=Side(tables=src_blocks, block_size=src_layout.model.block_size),
        target=Side(tables=dst_blocks, block_size=dst_layout.model.block_size),
    )


def cut(
    source: ShardLayout,
    target: ShardLayout,
    *,
    span: TokenSpan,
    staging_bytes: int,
    layer_groups: int = 1,
    codec: Codec = Codec.NONE,
    wire_dtype: str | None = None,
) -> tuple[SlabWrite, ...]:
    """The writes, each of at most `staging_bytes` of payload, and at most 1 + twice as many of them
    per layer group as the bytes alone need.

    The layers that travel are cut into `layer_groups` runs of consecutive layers (fewer if there
    are fewer layers); no write mixes two, and the first layers come first. A section has at least
    128 tokens, or all that its group sends, wherever staging holds twice that of one layer.
    `wire_dtype` is the slab's under codec none: the source's own if not given; each side converts
    to or from its own. Raises ConfigError if staging doesn't hold one token of one layer, or if a
    tensor parallel degree can't split the heads.
    """
    assert layer_groups > 0, layer_groups
    wire = WireFormat(dtype=wire_dtype or source.model.dtype, codec=codec)
    seen = [span.seen(group.window) for group in source.model.groups]
    sent = tuple(index for index, tokens in enumerate(seen) if tokens)
    writes: list[SlabWrite] = []
    for parts in _parts_by_layers(source, target, sent, layer_groups):
        sections = (
            section
            for part in parts
            for section in _sections(part, seen[part.part.group], wire, staging_bytes)
        )
        writes += _packed(sections, wire, staging_bytes)
    return tuple(writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The data that one group sends of each token: `layers` are the model's, as many as `part` has,
    and `planes` have (heads, dim)."""

    part: GroupSlice
    layers: tuple[int, ...]
    planes: tuple[tuple[int, int], ...]

    def within(self, layers: range) -> _Part:
        inside = [i for i, layer in enumerate(self.layers) if layer in layers]
        return self.narrow(range(inside[0], inside[-1] + 1) if inside else range(0))

    def narrow(self, members: range) -> _Part:
        if len(members) == len(self.layers):
            return self
        part = replace(
            self.part,
            source_layer=self.part.source_layer + members.start,
            target_layer=self.part.target_layer + members.start,
            layers=len(members),
        )
        return replace(self, part=part, layers=self.layers[members.start : members.stop])

    def nbytes(self, wire: WireFormat, layers: int, tokens: int) -> int:
        return wire.encoded_bytes(layers, tokens, self.planes)


@lru_cache(maxsize=256)
def _parts_by_layers(
    source: ShardLayout, target: ShardLayout, sent: tuple[int, ...], layer_groups: int
) -> tuple[tuple[_Part, ...], ...]:
    """# run of layers |-> its part of each of the `sent` groups, for any tokens"""
    parts = _parts(source, target, sent)
    runs = _layer_runs(parts, layer_groups)
    within = ((part.within(layers) for part in parts) for layers in runs)
    return tuple(tuple(part for part in some if part.layers) for some in within)


def _parts(source: ShardLayout, target: ShardLayout, sent: Sequence[int]) -> list[_Part]:
    parts: list[_Part] = []
    for part in reslice(source, target):
        group = source.model.groups[part.group]
        first = source.shard.members(group).start + part.source_layer
        if part.group in sent:
            layers = group.layers[first : first + part.layers]
            planes = tuple((plane.heads, plane.dim) for plane in part.planes)
            parts.append(_Part(part=part, layers=layers, planes=planes))
    return parts


def _layer_runs(parts: Sequence[_Part], count: int) -> Iterator[range]:
    """The layers that travel, in even pieces, as ranges of the model's layers."""
    layers = sorted(layer for part in parts for layer in part.layers)
    for piece in split(range(len(layers)), min(count, len(layers))):
        yield range(layers[piece[0]], layers[piece[-1]] + 1)


def _sections(
    part: _Part, seen: range, wire: WireFormat, staging_bytes: int
) -> Iterator[SlabSection]:
    """As many layers as 128 tokens leave room for, then as many tokens as fit; even pieces."""
    whole = part.nbytes(wire, len(part.layers), len(seen))
    if whole <= staging_bytes:
        yield _section(part, seen, whole)
        return
    least = least_tokens(seen)
    layers_fit = _most(len(part.layers), staging_bytes, lambda n: part.nbytes(wire, n, least))
    if not layers_fit:
        _check_fits(part, wire, staging_bytes)
    for members in even_pieces(range(len(part.layers)), max(1, layers_fit)):
        yield from _token_sections(part.narrow(members), seen, wire, staging_bytes)


def _token_sections(
    part: _Part, seen: range, wire: WireFormat, staging_bytes: int
) -> Iterator[SlabSection]:
    layers = len(part.layers)
    tokens_fit = _most(len(seen), staging_bytes, lambda n: part.nbytes(wire, layers, n))
    for tokens in token_pieces(seen, tokens_fit):
        yield _section(part, tokens, part.nbytes(wire, layers, len(tokens)))


def _section(part: _Part, tokens: range, nbytes: int) -> SlabSection:
    return SlabSection(
        part=part.part,
        last_layer=part.layers[-1],
        start=tokens.start,
        tokens=len(tokens),
        offset_bytes=0,
        nbytes=nbytes,
    )


def _check_fits(part: _Part, wire: WireFormat, staging_bytes: int) -> None:
    least = part.nbytes(wire, 1, 1)
    if least > staging_bytes:
        raise ConfigError(
            f"transfer.staging_bytes {staging_bytes} can't hold one token of one layer; it must "
            f"be at least {least}, better {part.nbytes(wire, len(part.layers), WRITE_TOKENS)}"
        )


def _packed(
    sections: Iterable[SlabSection], wire: WireFormat, staging_bytes: int
) -> Iterator[SlabWrite]:
    placed: list[SlabSection] = []
    used_bytes = 0
    for section in sections:
        if used_bytes + section.nbytes > staging_bytes:
            yield SlabWrite(sections=tuple(placed), wire=wire)
            placed, used_bytes = [], 0
        placed.append(replace(section, offset_bytes=used_bytes) if used_bytes else section)
        used_bytes += section.nbytes
    if placed:
        yield SlabWrite(sections=tuple(placed), wire=wire)


def _most(count: int, room_bytes: int, nbytes: Callable[[int], int]) -> int:
    """The largest of 1..count whose `nbytes`, which never falls, fits; 0 if none does."""
    if nbytes(count) <= room_bytes:
        return count
    return bisect_right(range(1, count + 1), room_bytes, key=nbytes)
