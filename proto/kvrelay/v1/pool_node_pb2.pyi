from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("wire_version",)
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    def __init__(self, wire_version: _Optional[int] = ...) -> None: ...

class PoolUpdate(_message.Message):
    __slots__ = ("sequence", "node", "addresses", "workers", "blocks")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    node: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockChanges]
    def __init__(self, sequence: _Optional[int] = ..., node: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[_Union[BlockChanges, _Mapping]]] = ...) -> None: ...

class BlockChanges(_message.Message):
    __slots__ = ("tier", "cut", "stored")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    cut: _containers.RepeatedCompositeFieldContainer[CutRun]
    stored: _containers.RepeatedCompositeFieldContainer[StoredRun]
    def __init__(self, tier: _Optional[str] = ..., cut: _Optional[_Iterable[_Union[CutRun, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[StoredRun, _Mapping]]] = ...) -> None: ...

class CutRun(_message.Message):
    __slots__ = ("number", "end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    number: int
    end: int
    def __init__(self, number: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class StoredRun(_message.Message):
    __slots__ = ("number", "parent", "start", "hashes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    number: int
    parent: int
    start: int
    hashes: bytes
    def __init__(self, number: _Optional[int] = ..., parent: _Optional[int] = ..., start: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class PoolReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolReport(_message.Message):
    __slots__ = ("name", "incarnation", "format", "block_bytes", "tiers", "disk_waiting", "orphaned_blocks", "held", "gc_pauses", "gc_pause_s", "gc_longest_pause_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DISK_WAITING_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    GC_PAUSES_FIELD_NUMBER: _ClassVar[int]
    GC_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    GC_LONGEST_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    format: str
    block_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    disk_waiting: int
    orphaned_blocks: int
    held: _containers.RepeatedCompositeFieldContainer[HeldForWorker]
    gc_pauses: int
    gc_pause_s: float
    gc_longest_pause_s: float
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., format: _Optional[str] = ..., block_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ..., disk_waiting: _Optional[int] = ..., orphaned_blocks: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldForWorker, _Mapping]]] = ..., gc_pauses: _Optional[int] = ..., gc_pause_s: _Optional[float] = ..., gc_longest_pause_s: _Optional[float] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "total_blocks", "states", "cached")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    total_blocks: int
    states: _containers.RepeatedCompositeFieldContainer[StateBlocks]
    cached: _containers.RepeatedCompositeFieldContainer[CachedBlocks]
    def __init__(self, tier: _Optional[str] = ..., total_blocks: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StateBlocks, _Mapping]]] = ..., cached: _Optional[_Iterable[_Union[CachedBlocks, _Mapping]]] = ...) -> None: ...

class CachedBlocks(_message.Message):
    __slots__ = ("tenant", "blocks", "oldest_s", "newest_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    NEWEST_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    blocks: int
    oldest_s: float
    newest_s: float
    def __init__(self, tenant: _Optional[str] = ..., blocks: _Optional[int] = ..., oldest_s: _Optional[float] = ..., newest_s: _Optional[float] = ...) -> None: ...

class StateBlocks(_message.Message):
    __slots__ = ("state", "blocks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    state: str
    blocks: int
    def __init__(self, state: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class HeldForWorker(_message.Message):
    __slots__ = ("worker", "state", "blocks", "age_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    state: str
    blocks: int
    age_s: float
    def __init__(self, worker: _Optional[str] = ..., state: _Optional[str] = ..., blocks: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...
