from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolMessage(_message.Message):
    __slots__ = ("hello", "welcome", "refused", "store_wanted", "store_granted", "stored", "store_abandoned", "fetch_wanted", "fetched", "fetch_done", "lookup_wanted", "looked_up", "store_confirmed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STORE_WANTED_FIELD_NUMBER: _ClassVar[int]
    STORE_GRANTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORE_ABANDONED_FIELD_NUMBER: _ClassVar[int]
    FETCH_WANTED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    FETCH_DONE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_WANTED_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    STORE_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    hello: PoolHello
    welcome: PoolWelcome
    refused: PoolRefused
    store_wanted: StoreWanted
    store_granted: StoreGranted
    stored: Stored
    store_abandoned: StoreAbandoned
    fetch_wanted: FetchWanted
    fetched: Fetched
    fetch_done: FetchDone
    lookup_wanted: LookupWanted
    looked_up: LookedUp
    store_confirmed: StoreConfirmed
    def __init__(self, hello: _Optional[_Union[PoolHello, _Mapping]] = ..., welcome: _Optional[_Union[PoolWelcome, _Mapping]] = ..., refused: _Optional[_Union[PoolRefused, _Mapping]] = ..., store_wanted: _Optional[_Union[StoreWanted, _Mapping]] = ..., store_granted: _Optional[_Union[StoreGranted, _Mapping]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ..., store_abandoned: _Optional[_Union[StoreAbandoned, _Mapping]] = ..., fetch_wanted: _Optional[_Union[FetchWanted, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., fetch_done: _Optional[_Union[FetchDone, _Mapping]] = ..., lookup_wanted: _Optional[_Union[LookupWanted, _Mapping]] = ..., looked_up: _Optional[_Union[LookedUp, _Mapping]] = ..., store_confirmed: _Optional[_Union[StoreConfirmed, _Mapping]] = ...) -> None: ...

class PoolHello(_message.Message):
    __slots__ = ("wire_version", "incarnation", "format", "looks_up")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LOOKS_UP_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    format: PoolFormat
    looks_up: bool
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., format: _Optional[_Union[PoolFormat, _Mapping]] = ..., looks_up: _Optional[bool] = ...) -> None: ...

class PoolFormat(_message.Message):
    __slots__ = ("fingerprint", "physical_format", "block_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    physical_format: str
    block_bytes: int
    def __init__(self, fingerprint: _Optional[str] = ..., physical_format: _Optional[str] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class PoolWelcome(_message.Message):
    __slots__ = ("wire_version", "incarnation", "region", "lease_ttl_s", "addresses")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    region: str
    lease_ttl_s: float
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., region: _Optional[str] = ..., lease_ttl_s: _Optional[float] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolRefused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StoreWanted(_message.Message):
    __slots__ = ("request_no", "blocks")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    blocks: _containers.RepeatedCompositeFieldContainer[ChainBlock]
    def __init__(self, request_no: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[ChainBlock, _Mapping]]] = ...) -> None: ...

class ChainBlock(_message.Message):
    __slots__ = ("hash", "parent", "tenant")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent: bytes
    tenant: str
    def __init__(self, hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class StoreGranted(_message.Message):
    __slots__ = ("request_no", "indices", "places")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_no: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("request_no", "checksums")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_no: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class StoreConfirmed(_message.Message):
    __slots__ = ("request_no", "readable")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    readable: bool
    def __init__(self, request_no: _Optional[int] = ..., readable: _Optional[bool] = ...) -> None: ...

class StoreAbandoned(_message.Message):
    __slots__ = ("request_no",)
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    def __init__(self, request_no: _Optional[int] = ...) -> None: ...

class FetchWanted(_message.Message):
    __slots__ = ("request_no", "hashes", "skip")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    hashes: bytes
    skip: int
    def __init__(self, request_no: _Optional[int] = ..., hashes: _Optional[bytes] = ..., skip: _Optional[int] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("request_no", "places", "checksums")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    places: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_no: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchDone(_message.Message):
    __slots__ = ("request_no", "damaged")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    damaged: bytes
    def __init__(self, request_no: _Optional[int] = ..., damaged: _Optional[bytes] = ...) -> None: ...

class LookupWanted(_message.Message):
    __slots__ = ("request_no", "hashes")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    hashes: bytes
    def __init__(self, request_no: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class LookedUp(_message.Message):
    __slots__ = ("request_no", "host_blocks", "disk_blocks")
    REQUEST_NO_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_no: int
    host_blocks: int
    disk_blocks: int
    def __init__(self, request_no: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ...) -> None: ...
