from kvrelay.v1 import inference_pb2 as _inference_pb2
from kvrelay.v1 import pool_node_pb2 as _pool_node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("address", "is_pool_node", "routers")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_POOL_NODE_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    address: str
    is_pool_node: bool
    routers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[str] = ..., is_pool_node: _Optional[bool] = ..., routers: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Key(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("key", "prompt_ids", "sampling", "tenant", "qos_tier", "tpot_s", "emitted_ids", "resumed", "finished_choices")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QOS_TIER_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    EMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    key: Key
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    tenant: str
    qos_tier: str
    tpot_s: float
    emitted_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed: _containers.RepeatedCompositeFieldContainer[EmittedIds]
    finished_choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tenant: _Optional[str] = ..., qos_tier: _Optional[str] = ..., tpot_s: _Optional[float] = ..., emitted_ids: _Optional[_Iterable[int]] = ..., resumed: _Optional[_Iterable[_Union[EmittedIds, _Mapping]]] = ..., finished_choices: _Optional[_Iterable[int]] = ...) -> None: ...

class EmittedIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "n", "logprobs", "seed", "logit_bias", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n: int
    logprobs: int
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("hello", "reserve", "prefill", "generate", "abort", "stop", "preload", "refused")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    reserve: Reserve
    prefill: Prefill
    generate: Generate
    abort: Abort
    stop: Stop
    preload: Preload
    refused: RouterRefused
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., preload: _Optional[_Union[Preload, _Mapping]] = ..., refused: _Optional[_Union[RouterRefused, _Mapping]] = ...) -> None: ...

class RouterRefused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("wire_version", "router_incarnation")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    router_incarnation: str
    def __init__(self, wire_version: _Optional[int] = ..., router_incarnation: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("spec", "source_incarnation", "counted")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    source_incarnation: str
    counted: int
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., source_incarnation: _Optional[str] = ..., counted: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("spec", "target_addresses", "target_incarnation", "held_tokens", "prefix_source", "within_s")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    target_addresses: _containers.RepeatedScalarFieldContainer[str]
    target_incarnation: str
    held_tokens: int
    prefix_source: PrefixSource
    within_s: float
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., target_addresses: _Optional[_Iterable[str]] = ..., target_incarnation: _Optional[str] = ..., held_tokens: _Optional[int] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., within_s: _Optional[float] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("incarnation", "addresses", "blocks", "is_pool_node")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_POOL_NODE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    is_pool_node: bool
    def __init__(self, incarnation: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ..., is_pool_node: _Optional[bool] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("spec", "within_s")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    within_s: float
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., within_s: _Optional[float] = ...) -> None: ...

class Preload(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("key", "choice", "valid_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    choice: int
    valid_tokens: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., choice: _Optional[int] = ..., valid_tokens: _Optional[int] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("hello", "events", "counters", "blocks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    events: _containers.RepeatedCompositeFieldContainer[Event]
    counters: Counters
    blocks: _containers.RepeatedCompositeFieldContainer[_pool_node_pb2.BlockChanges]
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[_pool_node_pb2.BlockChanges, _Mapping]]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("wire_version", "name", "incarnation", "role", "device", "transfer_addresses", "fingerprint", "block_size", "total_blocks", "max_model_len", "max_running_requests", "vocab_size", "transport", "architecture", "prefill_chunk_tokens", "physical_format", "rope_border_tokens", "kv_token_bytes", "step_times", "cpus")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ROPE_BORDER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    name: str
    incarnation: str
    role: str
    device: str
    transfer_addresses: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    block_size: int
    total_blocks: int
    max_model_len: int
    max_running_requests: int
    vocab_size: int
    transport: str
    architecture: str
    prefill_chunk_tokens: int
    physical_format: str
    rope_border_tokens: int
    kv_token_bytes: int
    step_times: _inference_pb2.StepTimes
    cpus: str
    def __init__(self, wire_version: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., transfer_addresses: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., vocab_size: _Optional[int] = ..., transport: _Optional[str] = ..., architecture: _Optional[str] = ..., prefill_chunk_tokens: _Optional[int] = ..., physical_format: _Optional[str] = ..., rope_border_tokens: _Optional[int] = ..., kv_token_bytes: _Optional[int] = ..., step_times: _Optional[_Union[_inference_pb2.StepTimes, _Mapping]] = ..., cpus: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("key", "age_s", "reserved", "reserve_refused", "lifetime", "tokens", "failed", "released", "prompt_logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RESERVE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    age_s: float
    reserved: Reserved
    reserve_refused: ReserveRefused
    lifetime: Lifetime
    tokens: Tokens
    failed: RequestFailed
    released: Released
    prompt_logprobs: PromptLogprobs
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., age_s: _Optional[float] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., reserve_refused: _Optional[_Union[ReserveRefused, _Mapping]] = ..., lifetime: _Optional[_Union[Lifetime, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("held_tokens",)
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    def __init__(self, held_tokens: _Optional[int] = ...) -> None: ...

class ReserveRefused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Lifetime(_message.Message):
    __slots__ = ("name", "tokens", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: int
    source: str
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("choice", "first_index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "stood_back_s")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOOD_BACK_S_FIELD_NUMBER: _ClassVar[int]
    choice: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish_reason: str
    stop_token_id: int
    stood_back_s: float
    def __init__(self, choice: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., stood_back_s: _Optional[float] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "token_ids", "logprobs", "ranks", "top", "top_ids", "top_logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Counters(_message.Message):
    __slots__ = ("free_blocks", "leased_blocks", "active_blocks", "cached_blocks", "running", "waiting", "steps", "prompt_tokens", "generated_tokens", "preemptions", "transfer_bytes", "transfers", "transfer_s", "busy_s", "prefill_waiting_tokens", "orphaned_blocks", "prefix_queried_tokens", "prefix_hit_tokens", "links", "pool_queried_tokens", "pool_host_tokens", "pool_disk_tokens", "pool_declined_tokens", "canaries_passed", "canaries_mismatched", "peer_tokens", "prefixes_device", "prefixes_host", "prefixes_disk", "prefixes_peer", "prefixes_computed", "decode_sequences", "decode_kv_tokens", "reserved_sequences", "prefill_correction", "decode_correction", "prefixes_remote", "pool_remote_tokens", "tiers", "draining", "gc_pauses", "gc_pause_s", "gc_longest_pause_s")
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
    GC_PAUSES_FIELD_NUMBER: _ClassVar[int]
    GC_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    GC_LONGEST_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
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
    links: _containers.RepeatedCompositeFieldContainer[Link]
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
    gc_pauses: int
    gc_pause_s: float
    gc_longest_pause_s: float
    def __init__(self, free_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., transfer_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., prefill_waiting_tokens: _Optional[int] = ..., orphaned_blocks: _Optional[int] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., pool_queried_tokens: _Optional[int] = ..., pool_host_tokens: _Optional[int] = ..., pool_disk_tokens: _Optional[int] = ..., pool_declined_tokens: _Optional[int] = ..., canaries_passed: _Optional[int] = ..., canaries_mismatched: _Optional[int] = ..., peer_tokens: _Optional[int] = ..., prefixes_device: _Optional[int] = ..., prefixes_host: _Optional[int] = ..., prefixes_disk: _Optional[int] = ..., prefixes_peer: _Optional[int] = ..., prefixes_computed: _Optional[int] = ..., decode_sequences: _Optional[int] = ..., decode_kv_tokens: _Optional[int] = ..., reserved_sequences: _Optional[int] = ..., prefill_correction: _Optional[float] = ..., decode_correction: _Optional[float] = ..., prefixes_remote: _Optional[int] = ..., pool_remote_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ..., draining: _Optional[bool] = ..., gc_pauses: _Optional[int] = ..., gc_pause_s: _Optional[float] = ..., gc_longest_pause_s: _Optional[float] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("tier", "running", "waiting")
    TIER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    tier: str
    running: int
    waiting: int
    def __init__(self, tier: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
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

class DebugKvRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DebugKvResponse(_message.Message):
    __slots__ = ("worker", "incarnation", "total_blocks", "free_blocks", "leased_blocks", "active_blocks", "cached_blocks", "orphaned_blocks", "held", "slabs", "total_slabs", "cached")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLABS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    active_blocks: int
    cached_blocks: int
    orphaned_blocks: int
    held: _containers.RepeatedCompositeFieldContainer[HeldBlocks]
    slabs: _containers.RepeatedCompositeFieldContainer[HeldSlab]
    total_slabs: int
    cached: _containers.RepeatedCompositeFieldContainer[_pool_node_pb2.CachedBlocks]
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., orphaned_blocks: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldBlocks, _Mapping]]] = ..., slabs: _Optional[_Iterable[_Union[HeldSlab, _Mapping]]] = ..., total_slabs: _Optional[int] = ..., cached: _Optional[_Iterable[_Union[_pool_node_pb2.CachedBlocks, _Mapping]]] = ...) -> None: ...

class HeldBlocks(_message.Message):
    __slots__ = ("holder", "state", "block_ids", "age_s", "request_id", "tenant")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    holder: str
    state: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    age_s: float
    request_id: str
    tenant: str
    def __init__(self, holder: _Optional[str] = ..., state: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., age_s: _Optional[float] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class HeldSlab(_message.Message):
    __slots__ = ("slab_id", "state", "holder", "age_s")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    slab_id: int
    state: str
    holder: str
    age_s: float
    def __init__(self, slab_id: _Optional[int] = ..., state: _Optional[str] = ..., holder: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...
