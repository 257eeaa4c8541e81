from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "pieces_ahead", "slab_lent", "slab_filled", "commit", "committed", "cancel_transfer", "transfer_cancelled", "renew_leases", "pieces_awaited", "piece_computed", "pieces_read", "prefix_stored", "ping", "pong", "link_probed", "link_stalled", "pull_wanted", "pull_granted", "pull_read", "pull_settled")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PIECES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    SLAB_LENT_FIELD_NUMBER: _ClassVar[int]
    SLAB_FILLED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASES_FIELD_NUMBER: _ClassVar[int]
    PIECES_AWAITED_FIELD_NUMBER: _ClassVar[int]
    PIECE_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PIECES_READ_FIELD_NUMBER: _ClassVar[int]
    PREFIX_STORED_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    LINK_PROBED_FIELD_NUMBER: _ClassVar[int]
    LINK_STALLED_FIELD_NUMBER: _ClassVar[int]
    PULL_WANTED_FIELD_NUMBER: _ClassVar[int]
    PULL_GRANTED_FIELD_NUMBER: _ClassVar[int]
    PULL_READ_FIELD_NUMBER: _ClassVar[int]
    PULL_SETTLED_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    pieces_ahead: PiecesAhead
    slab_lent: SlabLent
    slab_filled: SlabFilled
    commit: Commit
    committed: Committed
    cancel_transfer: CancelTransfer
    transfer_cancelled: TransferCancelled
    renew_leases: RenewLeases
    pieces_awaited: PiecesAwaited
    piece_computed: PieceComputed
    pieces_read: PiecesRead
    prefix_stored: PrefixStored
    ping: Ping
    pong: Pong
    link_probed: LinkProbed
    link_stalled: LinkStalled
    pull_wanted: PullWanted
    pull_granted: PullGranted
    pull_read: PullRead
    pull_settled: PullSettled
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., pieces_ahead: _Optional[_Union[PiecesAhead, _Mapping]] = ..., slab_lent: _Optional[_Union[SlabLent, _Mapping]] = ..., slab_filled: _Optional[_Union[SlabFilled, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., cancel_transfer: _Optional[_Union[CancelTransfer, _Mapping]] = ..., transfer_cancelled: _Optional[_Union[TransferCancelled, _Mapping]] = ..., renew_leases: _Optional[_Union[RenewLeases, _Mapping]] = ..., pieces_awaited: _Optional[_Union[PiecesAwaited, _Mapping]] = ..., piece_computed: _Optional[_Union[PieceComputed, _Mapping]] = ..., pieces_read: _Optional[_Union[PiecesRead, _Mapping]] = ..., prefix_stored: _Optional[_Union[PrefixStored, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., link_probed: _Optional[_Union[LinkProbed, _Mapping]] = ..., link_stalled: _Optional[_Union[LinkStalled, _Mapping]] = ..., pull_wanted: _Optional[_Union[PullWanted, _Mapping]] = ..., pull_granted: _Optional[_Union[PullGranted, _Mapping]] = ..., pull_read: _Optional[_Union[PullRead, _Mapping]] = ..., pull_settled: _Optional[_Union[PullSettled, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("wire_version", "incarnation", "fingerprint", "kv", "name", "probe_region")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROBE_REGION_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    fingerprint: str
    kv: KvFacts
    name: str
    probe_region: str
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., kv: _Optional[_Union[KvFacts, _Mapping]] = ..., name: _Optional[str] = ..., probe_region: _Optional[str] = ...) -> None: ...

class KvFacts(_message.Message):
    __slots__ = ("block_size", "blocks", "slab_bytes", "region", "dtype", "offer", "mixed_precision", "ranks")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    MIXED_PRECISION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    blocks: int
    slab_bytes: int
    region: str
    dtype: str
    offer: CodecOffer
    mixed_precision: bool
    ranks: int
    def __init__(self, block_size: _Optional[int] = ..., blocks: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., region: _Optional[str] = ..., dtype: _Optional[str] = ..., offer: _Optional[_Union[CodecOffer, _Mapping]] = ..., mixed_precision: _Optional[bool] = ..., ranks: _Optional[int] = ...) -> None: ...

class CodecOffer(_message.Message):
    __slots__ = ("speeds", "only_if_faster")
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    ONLY_IF_FASTER_FIELD_NUMBER: _ClassVar[int]
    speeds: _containers.RepeatedCompositeFieldContainer[CodecSpeed]
    only_if_faster: bool
    def __init__(self, speeds: _Optional[_Iterable[_Union[CodecSpeed, _Mapping]]] = ..., only_if_faster: _Optional[bool] = ...) -> None: ...

class CodecSpeed(_message.Message):
    __slots__ = ("codec", "encode_per_s", "decode_per_s")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ENCODE_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_PER_S_FIELD_NUMBER: _ClassVar[int]
    codec: str
    encode_per_s: float
    decode_per_s: float
    def __init__(self, codec: _Optional[str] = ..., encode_per_s: _Optional[float] = ..., decode_per_s: _Optional[float] = ...) -> None: ...

class PiecesAhead(_message.Message):
    __slots__ = ("key", "number", "piece", "held", "count")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    number: int
    piece: Piece
    held: _containers.RepeatedCompositeFieldContainer[PieceBlocks]
    count: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., number: _Optional[int] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., held: _Optional[_Iterable[_Union[PieceBlocks, _Mapping]]] = ..., count: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("span", "index")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    span: TokenSpan
    index: int
    def __init__(self, span: _Optional[_Union[TokenSpan, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class TokenSpan(_message.Message):
    __slots__ = ("start", "tokens", "next_position")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: int
    next_position: int
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[int] = ..., next_position: _Optional[int] = ...) -> None: ...

class PieceBlocks(_message.Message):
    __slots__ = ("group", "first", "runs")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    group: int
    first: int
    runs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., first: _Optional[int] = ..., runs: _Optional[_Iterable[int]] = ...) -> None: ...

class SlabLent(_message.Message):
    __slots__ = ("key", "piece", "slab_id", "region", "lease_id", "codec")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    piece: int
    slab_id: int
    region: str
    lease_id: int
    codec: str
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., piece: _Optional[int] = ..., slab_id: _Optional[int] = ..., region: _Optional[str] = ..., lease_id: _Optional[int] = ..., codec: _Optional[str] = ...) -> None: ...

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

class PiecesAwaited(_message.Message):
    __slots__ = ("key", "pieces")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    pieces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., pieces: _Optional[_Iterable[int]] = ...) -> None: ...

class PieceComputed(_message.Message):
    __slots__ = ("key", "piece")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    piece: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., piece: _Optional[int] = ...) -> None: ...

class PiecesRead(_message.Message):
    __slots__ = ("key", "pieces")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    pieces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., pieces: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixStored(_message.Message):
    __slots__ = ("key", "tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    tokens: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("key", "pieces", "first_token_ids", "finished_choices", "digest", "resumed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.Key
    pieces: int
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished_choices: _containers.RepeatedScalarFieldContainer[int]
    digest: KvDigest
    resumed: _containers.RepeatedCompositeFieldContainer[_worker_pb2.EmittedIds]
    def __init__(self, key: _Optional[_Union[_worker_pb2.Key, _Mapping]] = ..., pieces: _Optional[int] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., finished_choices: _Optional[_Iterable[int]] = ..., digest: _Optional[_Union[KvDigest, _Mapping]] = ..., resumed: _Optional[_Iterable[_Union[_worker_pb2.EmittedIds, _Mapping]]] = ...) -> None: ...

class KvDigest(_message.Message):
    __slots__ = ("start", "planes")
    START_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    start: int
    planes: _containers.RepeatedCompositeFieldContainer[PlaneDigest]
    def __init__(self, start: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[PlaneDigest, _Mapping]]] = ...) -> None: ...

class PlaneDigest(_message.Message):
    __slots__ = ("norms", "sums")
    NORMS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    norms: _containers.RepeatedScalarFieldContainer[float]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, norms: _Optional[_Iterable[float]] = ..., sums: _Optional[_Iterable[float]] = ...) -> None: ...

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
    __slots__ = ("keys", "waiting")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Key]
    waiting: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Key]
    def __init__(self, keys: _Optional[_Iterable[_Union[_worker_pb2.Key, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[_worker_pb2.Key, _Mapping]]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinkProbed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinkStalled(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullWanted(_message.Message):
    __slots__ = ("pull", "hashes", "skip", "more")
    PULL_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    pull: int
    hashes: bytes
    skip: int
    more: bool
    def __init__(self, pull: _Optional[int] = ..., hashes: _Optional[bytes] = ..., skip: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class PullGranted(_message.Message):
    __slots__ = ("pull", "blocks", "held", "end")
    PULL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    pull: int
    blocks: int
    held: _containers.RepeatedCompositeFieldContainer[PieceBlocks]
    end: int
    def __init__(self, pull: _Optional[int] = ..., blocks: _Optional[int] = ..., held: _Optional[_Iterable[_Union[PieceBlocks, _Mapping]]] = ..., end: _Optional[int] = ...) -> None: ...

class PullRead(_message.Message):
    __slots__ = ("pull", "over")
    PULL_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    pull: int
    over: bool
    def __init__(self, pull: _Optional[int] = ..., over: _Optional[bool] = ...) -> None: ...

class PullSettled(_message.Message):
    __slots__ = ("pull", "held")
    PULL_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    pull: int
    held: bool
    def __init__(self, pull: _Optional[int] = ..., held: _Optional[bool] = ...) -> None: ...
