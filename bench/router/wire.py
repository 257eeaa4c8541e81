"""What a message costs to write and to read: by the general codec, and by a function written by
hand for this one message. CPU time of one thread, without the bytes.

python -m bench.router.wire
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.report import Row, print_table
from kvpool.core.transfer.messages import SlabFilled
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.wire.peer import PEER_CODEC
from kvrelay import wire
from kvrelay.counters import Counters
from kvrelay.messages import Tokens
from kvrelay.types import FinishReason, RequestKey
from kvrelay.v1 import peer_pb2
from kvrelay.v1 import worker_pb2 as pb

MOST_US = 2.0
"""More than this beside a hand-written function, and that message gets one (`travels_by`)."""
CALLS, ROUNDS = 5_000, 9

KEY = RequestKey("chatcmpl-0123456789abcdef", 1)
TOKENS = Tokens(key=KEY, at_s=3.0, choice=0, first_index=10, token_ids=(5,))
FILLED = SlabFilled(key=KEY, piece=1, slab_id=SlabId(1), lease_id=LeaseId(77))


def main() -> None:
    print_table("messages", [*rows()])


def rows() -> Iterator[Row]:
    event, filled = _write_tokens(TOKENS, 4.0), _write_filled(FILLED)
    assert wire.encode_event(TOKENS, 4.0) == event and PEER_CODEC.encode(FILLED) == filled
    yield _row(
        "Tokens of one step, written",
        lambda: wire.encode_event(TOKENS, 4.0),
        lambda: _write_tokens(TOKENS, 4.0),
    )
    yield _row(
        "Tokens of one step, read",
        lambda: wire.decode_event(event, 4.0),
        lambda: _read_tokens(event, 4.0),
    )
    yield _row(
        "SlabFilled, written", lambda: PEER_CODEC.encode(FILLED), lambda: _write_filled(FILLED)
    )
    yield _row("SlabFilled, read", lambda: PEER_CODEC.decode(filled), lambda: _read_filled(filled))
    batch = wire.encode_batch([], Counters(steps=1), 4.0)
    yield _row("Counters, written", lambda: wire.encode_batch([], Counters(steps=1), 4.0))
    yield _row("Counters, read", lambda: wire.decode_counters(batch.counters))


def _row(name: str, ours: Callable[[], Any], by_hand: Callable[[], Any] | None = None) -> Row:
    mine, other = _us(ours), None if by_hand is None else _us(by_hand)
    more = "" if other is None else f"{mine - other:+.2f} us, at most {MOST_US:g} are allowed; "
    return Row(
        name=name,
        value=mine,
        unit="us",
        against="" if other is None else "by hand",
        against_value=other,
        method=f"{more}the least of {ROUNDS} x {CALLS} calls, CPU time",
    )


def _us(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        for _ in range(CALLS):
            call()
        found.append((time.thread_time() - began_s) / CALLS * 1e6)
    return min(found)


def _write_tokens(event: Tokens, now_s: float) -> pb.Event:
    key = pb.Key(request_id=event.key.request_id, attempt=event.key.attempt)
    out = pb.Event(key=key, age_s=now_s - event.at_s)
    tokens = pb.Tokens(
        choice=event.choice,
        first_index=event.first_index,
        token_ids=event.token_ids,
        logprobs=map(wire.logprobs_to_wire, event.logprobs),
        finish_reason=event.finish_reason,
        stop_token_id=event.stop_token_id,
        stood_back_s=event.stood_back_s,
    )
    out.tokens.CopyFrom(tokens)
    return out


def _read_tokens(event: pb.Event, now_s: float) -> Tokens:
    told = event.tokens
    return Tokens(
        key=RequestKey(event.key.request_id, event.key.attempt),
        at_s=now_s - event.age_s,
        choice=told.choice,
        first_index=told.first_index,
        token_ids=tuple(told.token_ids),
        logprobs=tuple(map(wire.logprobs_from_wire, told.logprobs)),
        finish_reason=FinishReason(told.finish_reason) if told.HasField("finish_reason") else None,
        stop_token_id=told.stop_token_id if told.HasField("stop_token_id") else None,
        stood_back_s=told.stood_back_s,
    )


def _write_filled(filled: SlabFilled) -> peer_pb2.PeerMessage:
    message = peer_pb2.SlabFilled(
        key=pb.Key(request_id=filled.key.request_id, attempt=filled.key.attempt),
        piece=filled.piece,
        slab_id=filled.slab_id,
        lease_id=filled.lease_id,
    )
    return peer_pb2.PeerMessage(slab_filled=message)


def _read_filled(envelope: peer_pb2.PeerMessage) -> SlabFilled:
    told = envelope.slab_filled
    return SlabFilled(
        key=RequestKey(told.key.request_id, told.key.attempt),
        piece=told.piece,
        slab_id=SlabId(told.slab_id),
        lease_id=LeaseId(told.lease_id),
    )


if __name__ == "__main__":
    main()
