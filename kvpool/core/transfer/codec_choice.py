"""Chooses the codec of a link's slabs: one that both ends offer and that is faster there. Pure.

The receiver chooses. A piece that is read directly is never encoded, so a codec competes with the
direct way as well (LinkCost.choose).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpool.core.layout.codec import CODEC_BLOCK_TOKENS, Codec, WireFormat
from kvpool.core.layout.layout import DTYPE_BYTES, KvLayout
from kvpool.core.transfer.link_cost import LinkCost, TransferShape, TransferWay

_WORTH_ASKING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """Elements of KV per second that one worker encodes and decodes, gather and scatter
    included."""

    codec: Codec
    encode_per_s: float
    decode_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecOffer:
    """The codecs that a worker allows; `only_if_faster`: only where the link is the bottleneck."""

    speeds: tuple[CodecSpeed, ...] = ()
    only_if_faster: bool = False

    @property
    def codecs(self) -> frozenset[Codec]:
        return frozenset(speed.codec for speed in self.speeds)

    def __str__(self) -> str:
        return " or ".join(speed.codec for speed in self.speeds) or "no codec"


NO_CODEC = CodecOffer()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """`cost` is the link's cost with the codec, as far as it is known; bytes count before encoding.
    `reason` is a line for the log, empty if no codec was asked for."""

    codec: Codec = Codec.NONE
    cost: LinkCost | None = None
    reason: str = ""


def wire_dtype(source: str, target: str) -> str:
    """The dtype that travels: the smaller one, to send fewer bytes, else the source's. The side
    with the other dtype converts."""
    return target if DTYPE_BYTES[target] < DTYPE_BYTES[source] else source


def choose_codec(
    theirs: CodecOffer, ours: CodecOffer, layout: KvLayout, cost: LinkCost | None
) -> CodecChoice:
    """`theirs` is the sender's offer, `layout` that of the wire. `cost` None: the link is not
    measured, so no codec is known to be faster."""
    common = [(t, o) for t in theirs.speeds for o in ours.speeds if t.codec is o.codec]
    plain = CodecChoice(cost=cost)
    if not common:
        if not (theirs.speeds or ours.speeds):
            return plain
        return replace(plain, reason=f"codec none: it offers {theirs}, this worker {ours}")
    choices = [_encoded(sender, receiver, layout, cost) for sender, receiver in common]
    if not (theirs.only_if_faster or ours.only_if_faster):
        return replace(choices[0], reason=f"codec {choices[0].codec}: both ask for it")
    if cost is None:
        return replace(plain, reason="codec none: the link is not measured")
    return _fastest([plain, *choices])


def _fastest(choices: list[CodecChoice]) -> CodecChoice:
    best, next_best, *_ = sorted(choices, key=_seconds)
    compared = (f"{_seconds(c) * 1e3:.2f} ms with {c.codec}" for c in (best, next_best))
    return replace(best, reason=f"codec {best.codec}: a MiB takes {', '.join(compared)}")


def _seconds(choice: CodecChoice) -> float:
    assert choice.cost is not None
    shape = TransferShape(nbytes=_WORTH_ASKING_BYTES, descriptors=1, source_runs=1, target_runs=1)
    return choice.cost.seconds(TransferWay.COLLATED, shape)


def _encoded(
    sender: CodecSpeed, receiver: CodecSpeed, layout: KvLayout, cost: LinkCost | None
) -> CodecChoice:
    if cost is None:
        return CodecChoice(codec=sender.codec)
    with_codec = replace(
        cost,
        gather_bytes_per_s=sender.encode_per_s * layout.element_bytes,
        scatter_bytes_per_s=receiver.decode_per_s * layout.element_bytes,
        bytes_per_s=cost.bytes_per_s / encoded_share(layout, sender.codec),
    )
    return CodecChoice(codec=sender.codec, cost=with_codec)


def encoded_share(layout: KvLayout, codec: Codec) -> float:
    """Encoded bytes for each byte in `layout`."""
    wire = WireFormat(dtype=layout.dtype, codec=codec)
    encoded = sum(
        wire.encoded_bytes(len(g.layers), CODEC_BLOCK_TOKENS, [(p.heads, p.dim) for p in g.planes])
        for g in layout.groups
    )
    return encoded / (layout.bytes_per_token * CODEC_BLOCK_TOKENS)
