"""A header survives its journey, and a slab that is not what it should be says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.layout.codec import Codec
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.slabs import HEADER_BYTES, NO_CHECKSUM, SlabHeader, checksum
from kvpool.core.transfer.write import TokenSpan
from kvrelay.errors import PeerError

_MODEL = "0123456789abcdef" * 2
_PIECE = Piece(span=TokenSpan(start=4096, tokens=512, next_position=5000), index=2)
_PAYLOAD = bytes(range(250))


def _header(**changes: int | str | Piece) -> SlabHeader:
    fields: dict[str, int | str | Piece] = {
        "fingerprint": _MODEL,
        "dtype": "bfloat16",
        "codec": Codec.FP8,
        "lease_id": 7,
        "piece": _PIECE,
        "payload_bytes": len(_PAYLOAD),
        "checksum": checksum(memoryview(_PAYLOAD)),
    }
    return SlabHeader(**(fields | changes))  # type: ignore[arg-type]


places = st.integers(0, 2**64 - 1)


@given(
    places,
    st.builds(
        Piece,
        span=st.builds(TokenSpan, start=places, tokens=places, next_position=places),
        index=st.integers(0, 2**32 - 1),
    ),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(Codec),
)
def test_round_trip(lease_id: int, piece: Piece, dtype: str, codec: Codec) -> None:
    header = _header(lease_id=lease_id, piece=piece, dtype=dtype, codec=codec)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert SlabHeader.unpack(packed, fingerprint=_MODEL) == header


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_the_header_is_noticed(bit: int) -> None:
    packed = bytearray(_header().pack())
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerError):
        SlabHeader.unpack(bytes(packed), fingerprint=_MODEL)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda b: b[:100], "header of 100 bytes"),
        (lambda b: b"NOTASLAB" + b[8:], "not a slab: magic"),
        (lambda b: b[:8] + b"\xff\x7f" + b[10:], "wire version 32767"),
        (lambda b: b[:60] + b"\x01" + b[61:], "header is damaged"),
    ],
)
def test_damage_is_named(damage, reason) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PeerError, match=reason):
        SlabHeader.unpack(damage(_header().pack()), fingerprint=_MODEL)


def test_another_models_slab_is_refused() -> None:
    with pytest.raises(PeerError, match="another model: fingerprint ffff"):
        SlabHeader.unpack(_header(fingerprint="f" * 32).pack(), fingerprint=_MODEL)


def test_payload_may_be_followed_by_old_bytes() -> None:
    _header().check_payload(memoryview(_PAYLOAD + b"what an earlier slab left"))


@pytest.mark.parametrize("at", [0, 100, 249])
def test_damaged_payload(at: int) -> None:
    damaged = bytearray(_PAYLOAD)
    damaged[at] ^= 1
    with pytest.raises(PeerError, match="payload is damaged"):
        _header().check_payload(memoryview(damaged))


def test_payload_longer_than_the_slab() -> None:
    with pytest.raises(PeerError, match="length 250 is more than the 200"):
        _header().check_payload(memoryview(_PAYLOAD[:200]))


def test_a_payload_that_a_device_gathered_has_no_checksum() -> None:
    header = _header(checksum=NO_CHECKSUM)
    read = SlabHeader.unpack(header.pack(), fingerprint=header.fingerprint)
    read.check_payload(memoryview(bytes(len(_PAYLOAD))))
    with pytest.raises(PeerError, match="slab length"):
        read.check_payload(memoryview(_PAYLOAD[:200]))
