from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Counters(_message.Message):
    __slots__ = ("free_blocks", "leased_blocks", "active_blocks", "cached_blocks", "running", "waiting", "steps", "prompt_tokens", "generated_tokens", "preemptions", "transfer_bytes", "transfers", "transfer_s", "busy_s", "prefill_waiting_tokens", "orphaned_blocks", "prefix_queried_tokens", "prefix_hit_tokens", "links", "pool_queried_tokens", "pool_host_tokens", "pool_disk_tokens", "pool_declined_tokens", "canaries_passed", "canaries_mismatched", "peer_tokens", "prefixes_device", "prefixes_host", "prefixes_disk", "prefixes_peer", "prefixes_computed", "decode_sequences", "decode_kv_tokens", "reserved_sequences", "prefill_correction", "decode_correction", "prefixes_remote", "pool_remote_tokens", "tiers", "draining", "routers", "gc_pauses", "gc_pause_s", "gc_longest_pause_s", "role", "role_epoch")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    POOL_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_DECLINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANARIES_PASSED_FIELD_NUMBER: _ClassVar[int]
    CANARIES_MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_DEVICE_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_HOST_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_DISK_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_PEER_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DECODE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CORRECTION_FIELD_NUMBER: _ClassVar[int]
    DECODE_CORRECTION_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_REMOTE_FIELD_NUMBER: _ClassVar[int]
    POOL_REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    GC_PAUSES_FIELD_NUMBER: _ClassVar[int]
    GC_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    GC_LONGEST_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    leased_blocks: int
    active_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    transfer_bytes: int
    transfers: int
    transfer_s: float
    busy_s: float
    prefill_waiting_tokens: int
    orphaned_blocks: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    links: _containers.RepeatedCompositeFieldContainer[LinkState]
    pool_queried_tokens: int
    pool_host_tokens: int
    pool_disk_tokens: int
    pool_declined_tokens: int
    canaries_passed: int
    canaries_mismatched: int
    peer_tokens: int
    prefixes_device: int
    prefixes_host: int
    prefixes_disk: int
    prefixes_peer: int
    prefixes_computed: int
    decode_sequences: int
    decode_kv_tokens: int
    reserved_sequences: int
    prefill_correction: float
    decode_correction: float
    prefixes_remote: int
    pool_remote_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierLoad]
    draining: bool
    routers: int
    gc_pauses: int
    gc_pause_s: float
    gc_longest_pause_s: float
    role: str
    role_epoch: int
    def __init__(self, free_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., transfer_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., prefill_waiting_tokens: _Optional[int] = ..., orphaned_blocks: _Optional[int] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkState, _Mapping]]] = ..., pool_queried_tokens: _Optional[int] = ..., pool_host_tokens: _Optional[int] = ..., pool_disk_tokens: _Optional[int] = ..., pool_declined_tokens: _Optional[int] = ..., canaries_passed: _Optional[int] = ..., canaries_mismatched: _Optional[int] = ..., peer_tokens: _Optional[int] = ..., prefixes_device: _Optional[int] = ..., prefixes_host: _Optional[int] = ..., prefixes_disk: _Optional[int] = ..., prefixes_peer: _Optional[int] = ..., prefixes_computed: _Optional[int] = ..., decode_sequences: _Optional[int] = ..., decode_kv_tokens: _Optional[int] = ..., reserved_sequences: _Optional[int] = ..., prefill_correction: _Optional[float] = ..., decode_correction: _Optional[float] = ..., prefixes_remote: _Optional[int] = ..., pool_remote_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ..., draining: _Optional[bool] = ..., routers: _Optional[int] = ..., gc_pauses: _Optional[int] = ..., gc_pause_s: _Optional[float] = ..., gc_longest_pause_s: _Optional[float] = ..., role: _Optional[str] = ..., role_epoch: _Optional[int] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("tier", "running", "waiting")
    TIER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    tier: str
    running: int
    waiting: int
    def __init__(self, tier: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("peer", "transport", "bytes_per_s", "latency_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    transport: str
    bytes_per_s: float
    latency_s: float
    def __init__(self, peer: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...
