from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "slab_wanted", "slab_lent", "slab_filled", "slab_scattered", "commit", "committed", "cancelled", "fence", "fence_acknowledged")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SLAB_WANTED_FIELD_NUMBER: _ClassVar[int]
    SLAB_LENT_FIELD_NUMBER: _ClassVar[int]
    SLAB_FILLED_FIELD_NUMBER: _ClassVar[int]
    SLAB_SCATTERED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    FENCE_ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    slab_wanted: SlabWanted
    slab_lent: SlabLent
    slab_filled: SlabFilled
    slab_scattered: SlabScattered
    commit: Commit
    committed: Committed
    cancelled: TransferCancelled
    fence: Fence
    fence_acknowledged: FenceAcknowledged
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., slab_wanted: _Optional[_Union[SlabWanted, _Mapping]] = ..., slab_lent: _Optional[_Union[SlabLent, _Mapping]] = ..., slab_filled: _Optional[_Union[SlabFilled, _Mapping]] = ..., slab_scattered: _Optional[_Union[SlabScattered, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., cancelled: _Optional[_Union[TransferCancelled, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., fence_acknowledged: _Optional[_Union[FenceAcknowledged, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("wire_version", "incarnation", "fingerprint", "physical_format")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    fingerprint: str
    physical_format: str
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., physical_format: _Optional[str] = ...) -> None: ...

class SlabWanted(_message.Message):
    __slots__ = ("key", "chunk", "bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    chunk: int
    bytes: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., chunk: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class SlabLent(_message.Message):
    __slots__ = ("key", "chunk", "slab_id", "region", "offset", "bytes", "ttl_s", "lease_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    chunk: int
    slab_id: int
    region: str
    offset: int
    bytes: int
    ttl_s: float
    lease_id: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., chunk: _Optional[int] = ..., slab_id: _Optional[int] = ..., region: _Optional[str] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., ttl_s: _Optional[float] = ..., lease_id: _Optional[int] = ...) -> None: ...

class SlabFilled(_message.Message):
    __slots__ = ("key", "chunk", "slab_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    chunk: int
    slab_id: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., chunk: _Optional[int] = ..., slab_id: _Optional[int] = ...) -> None: ...

class SlabScattered(_message.Message):
    __slots__ = ("key", "chunk")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    chunk: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., chunk: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("key", "chunks", "first_token_ids", "finished")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    chunks: int
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., chunks: _Optional[int] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[bool]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ...) -> None: ...

class TransferCancelled(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    reason: str
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("slab_id", "lease_id")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    slab_id: int
    lease_id: int
    def __init__(self, slab_id: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class FenceAcknowledged(_message.Message):
    __slots__ = ("slab_id", "lease_id")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    slab_id: int
    lease_id: int
    def __init__(self, slab_id: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...
