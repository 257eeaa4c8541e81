"""What two workers' offers and a link's cost come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.core.layout.block_names import named_format
from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.codec_choice import (
    NO_CODEC,
    CodecOffer,
    CodecSpeed,
    choose_codec,
    encoded_share,
    wire_dtype,
)
from kvpool.core.transfer.link_cost import LinkCost, TransferShape, TransferWay
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import TokenSpan
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.probe import measure_codecs

KV = (Plane(name="k", heads=4, dim=64), Plane(name="v", heads=4, dim=64))
LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0, 2), planes=KV), LayerGroup(layers=(1,), planes=KV, window=64)),
    dtype="bfloat16",
    block_size=16,
)
LINK = LinkCost(
    transport="nixl",
    latency_s=1e-5,
    bytes_per_s=1e9,
    descriptor_s=1e-5,
    direct_bytes_per_s=1e9,
    gather_bytes_per_s=8e9,
    scatter_bytes_per_s=8e9,
    run_s=1e-7,
)


def offer(*codecs: Codec, auto: bool = False, per_s: float = 8e9) -> CodecOffer:
    speeds = (CodecSpeed(codec=c, encode_per_s=per_s, decode_per_s=per_s) for c in codecs)
    return CodecOffer(speeds=tuple(speeds), only_if_faster=auto)


INT8, FP8 = offer(Codec.INT8), offer(Codec.FP8)
AUTO = offer(Codec.INT8, Codec.FP8, auto=True)


@pytest.mark.parametrize("cost", [None, LINK])
def test_both_ask_for_it(cost: LinkCost | None) -> None:
    choice = choose_codec(INT8, INT8, LAYOUT, cost)
    assert (choice.codec, choice.reason) == (Codec.INT8, "codec int8: both ask for it")


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (NO_CODEC, NO_CODEC, ""),
        (INT8, NO_CODEC, "codec none: it offers int8, this worker no codec"),
        (NO_CODEC, AUTO, "codec none: it offers no codec, this worker int8 or fp8"),
        (FP8, INT8, "codec none: it offers fp8, this worker int8"),
    ],
)
def test_one_alone_gets_none(theirs: CodecOffer, ours: CodecOffer, reason: str) -> None:
    choice = choose_codec(theirs, ours, LAYOUT, LINK)
    assert (choice.codec, choice.cost, choice.reason) == (Codec.NONE, LINK, reason)


def test_auto_waits_for_the_measure() -> None:
    assert choose_codec(AUTO, AUTO, LAYOUT, None).codec is Codec.NONE
    assert choose_codec(AUTO, INT8, LAYOUT, None).codec is Codec.NONE


@pytest.mark.parametrize("theirs", [AUTO, FP8])
def test_auto_is_used_only_where_the_link_is_what_they_wait_for(theirs: CodecOffer) -> None:
    slow = choose_codec(theirs, AUTO, LAYOUT, LINK)
    assert slow.codec in {Codec.INT8, Codec.FP8}
    assert slow.codec in theirs.codecs
    assert slow.reason.startswith(f"codec {slow.codec}: a MiB takes 0.")
    for quick in (replace(LINK, bytes_per_s=1e12), replace(LINK, mapped=True)):
        weak = CodecOffer(
            speeds=tuple(replace(s, encode_per_s=1e9) for s in theirs.speeds),
            only_if_faster=theirs.only_if_faster,
        )
        assert choose_codec(weak, AUTO, LAYOUT, quick).codec is Codec.NONE


def test_auto_takes_the_faster_codec() -> None:
    theirs = CodecOffer(
        speeds=(
            CodecSpeed(codec=Codec.INT8, encode_per_s=1e9, decode_per_s=1e9),
            CodecSpeed(codec=Codec.FP8, encode_per_s=2e9, decode_per_s=1e9),
        ),
        only_if_faster=True,
    )
    crawling = replace(LINK, bytes_per_s=1e8)
    assert choose_codec(theirs, AUTO, LAYOUT, crawling).codec is Codec.FP8


def test_the_cost_with_a_codec_is_of_the_senders_encoding_and_the_receivers_decoding() -> None:
    theirs, ours = offer(Codec.INT8, per_s=1e9), offer(Codec.INT8, per_s=4e9)
    cost = choose_codec(theirs, ours, LAYOUT, LINK).cost
    assert cost is not None
    shape = TransferShape(nbytes=2_000_000, descriptors=9, source_runs=0, target_runs=0)
    share = encoded_share(LAYOUT, Codec.INT8)  # a million elements
    expected = 3e-5 + 1e6 / 1e9 + 2e6 * share / 1e9 + 1e6 / 4e9
    assert cost.seconds(TransferWay.COLLATED, shape) == pytest.approx(expected)
    assert cost.seconds(TransferWay.DIRECT, shape) == LINK.seconds(TransferWay.DIRECT, shape)


def test_the_share_is_a_byte_for_each_value_and_the_scales() -> None:
    assert encoded_share(LAYOUT, Codec.INT8) == pytest.approx((1 + 4 / (16 * 64)) / 2)
    assert encoded_share(LAYOUT, Codec.NONE) == 1


@pytest.mark.parametrize(
    ("source", "target", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
        ("float16", "bfloat16", "float16"),
        ("float32", "float32", "float32"),
    ],
)
def test_the_smaller_dtype_travels(source: str, target: str, wire: str) -> None:
    assert wire_dtype(source, target) == wire


@pytest.mark.parametrize("codec", Codec)
def test_an_encoded_write_is_what_the_cut_with_that_codec_has(codec: Codec) -> None:
    one = ShardLayout(model=LAYOUT, shard=Shard())
    span = TokenSpan(start=5, tokens=200, next_position=205)
    plain = cut(one, one, span=span, staging_bytes=1 << 30, layer_groups=2)
    encoded = tuple(write.encoded(codec) for write in plain)
    assert encoded == cut(one, one, span=span, staging_bytes=1 << 30, layer_groups=2, codec=codec)
    assert tuple(write.encoded(Codec.NONE) for write in encoded) == plain


def test_names_tell_what_may_have_been_lost() -> None:
    kinds = [(c, m) for c in ("none", "fp8", "int8", "auto") for m in (False, True)]
    formats = {named_format(LAYOUT, codec=c, mixed_precision=m) for c, m in kinds}
    assert len(formats) == len(kinds)
    plain = named_format(LAYOUT, codec="none", mixed_precision=False)
    assert plain == LAYOUT.physical_format()


def test_the_fingerprint_does_not_depend_on_the_dtype() -> None:
    assert replace(LAYOUT, dtype="float32").logical_fingerprint("m") == (
        LAYOUT.logical_fingerprint("m")
    )


def test_speeds_are_measured_of_what_is_asked_for() -> None:
    memory = KvMemory(LAYOUT, 2, "cpu")
    memory.flat.fill_(0x33)
    speeds = measure_codecs(memory, [Codec.FP8, Codec.INT8], 2**20)
    assert not memory.flat.any(), "no codec's bytes are left to attention"
    assert [speed.codec for speed in speeds] == [Codec.FP8, Codec.INT8]
    assert all(speed.encode_per_s > 1e6 and speed.decode_per_s > 1e6 for speed in speeds)
