from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "slab_wanted", "slab_lent", "slab_filled", "commit", "committed", "cancel_transfer", "transfer_cancelled", "renew_leases")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SLAB_WANTED_FIELD_NUMBER: _ClassVar[int]
    SLAB_LENT_FIELD_NUMBER: _ClassVar[int]
    SLAB_FILLED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASES_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    slab_wanted: SlabWanted
    slab_lent: SlabLent
    slab_filled: SlabFilled
    commit: Commit
    committed: Committed
    cancel_transfer: CancelTransfer
    transfer_cancelled: TransferCancelled
    renew_leases: RenewLeases
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., slab_wanted: _Optional[_Union[SlabWanted, _Mapping]] = ..., slab_lent: _Optional[_Union[SlabLent, _Mapping]] = ..., slab_filled: _Optional[_Union[SlabFilled, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., cancel_transfer: _Optional[_Union[CancelTransfer, _Mapping]] = ..., transfer_cancelled: _Optional[_Union[TransferCancelled, _Mapping]] = ..., renew_leases: _Optional[_Union[RenewLeases, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("key", "piece", "bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    piece: int
    bytes: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., piece: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class SlabLent(_message.Message):
    __slots__ = ("key", "piece", "slab_id", "region", "lease_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    piece: int
    slab_id: int
    region: str
    lease_id: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., piece: _Optional[int] = ..., slab_id: _Optional[int] = ..., region: _Optional[str] = ..., lease_id: _Optional[int] = ...) -> None: ...

class SlabFilled(_message.Message):
    __slots__ = ("key", "piece", "slab_id", "lease_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    piece: int
    slab_id: int
    lease_id: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., piece: _Optional[int] = ..., slab_id: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("key", "pieces", "first_token_ids", "finished_choices")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    pieces: int
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished_choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., pieces: _Optional[int] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., finished_choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ...) -> None: ...

class CancelTransfer(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    reason: str
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class TransferCancelled(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    reason: str
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class RenewLeases(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Key]
    def __init__(self, keys: _Optional[_Iterable[_Union[_worker_pb2.Key, _Mapping]]] = ...) -> None: ...
