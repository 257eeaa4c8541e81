"""Request keys to protobuf and back, as peers write them."""

from __future__ import annotations

from kvrelay.types import RequestKey
from kvrelay.v1 import worker_pb2


def encode_key(key: RequestKey) -> worker_pb2.Key:
    return worker_pb2.Key(request_id=key.request_id, attempt=key.attempt)


def decode_key(key: worker_pb2.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)
