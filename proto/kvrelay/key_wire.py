"""A request's key to protobuf and back. Pure."""

from __future__ import annotations

from kvrelay.types import RequestKey
from kvrelay.v1 import worker_pb2 as pb


def encode_key(key: RequestKey) -> pb.Key:
    return pb.Key(request_id=key.request_id, attempt=key.attempt)


def decode_key(key: pb.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)
