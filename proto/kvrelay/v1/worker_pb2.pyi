from kvrelay.v1 import counters_pb2 as _counters_pb2
from kvrelay.v1 import inference_pb2 as _inference_pb2
from kvrelay.v1 import pool_node_pb2 as _pool_node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckpointRequest(_message.Message):
    __slots__ = ("model", "revision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class CheckpointOffer(_message.Message):
    __slots__ = ("commit", "files", "hub_bytes_per_s")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    HUB_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    commit: str
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    hub_bytes_per_s: float
    def __init__(self, commit: _Optional[str] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., hub_bytes_per_s: _Optional[float] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "digest", "nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    nbytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ReadCheckpoint(_message.Message):
    __slots__ = ("commit", "names")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    commit: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, commit: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("key", "prompt_ids", "sampling", "tenant", "qos_tier", "tpot_s", "emitted_ids", "resumed", "finished_choices", "alone_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QOS_TIER_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    EMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    ALONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    tenant: str
    qos_tier: str
    tpot_s: float
    emitted_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed: _containers.RepeatedCompositeFieldContainer[EmittedIds]
    finished_choices: _containers.RepeatedScalarFieldContainer[int]
    alone_tokens: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tenant: _Optional[str] = ..., qos_tier: _Optional[str] = ..., tpot_s: _Optional[float] = ..., emitted_ids: _Optional[_Iterable[int]] = ..., resumed: _Optional[_Iterable[_Union[EmittedIds, _Mapping]]] = ..., finished_choices: _Optional[_Iterable[int]] = ..., alone_tokens: _Optional[int] = ...) -> None: ...

class EmittedIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "n", "logprobs", "seed", "logit_bias", "prompt_logprobs", "grammar")
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
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
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
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    prompt_logprobs: int
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("hello", "reserve", "prefill", "generate", "abort", "stop", "preload", "refused", "suspect", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    reserve: Reserve
    prefill: Prefill
    generate: Generate
    abort: Abort
    stop: Stop
    preload: Preload
    refused: RouterRefused
    suspect: Suspect
    leaving: RouterLeaving
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., preload: _Optional[_Union[Preload, _Mapping]] = ..., refused: _Optional[_Union[RouterRefused, _Mapping]] = ..., suspect: _Optional[_Union[Suspect, _Mapping]] = ..., leaving: _Optional[_Union[RouterLeaving, _Mapping]] = ...) -> None: ...

class RouterLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Suspect(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("spec", "source", "counted", "prefix_source", "displaced")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    source: str
    counted: int
    prefix_source: PrefixSource
    displaced: bool
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., source: _Optional[str] = ..., counted: _Optional[int] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., displaced: _Optional[bool] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("spec", "target_addresses", "target", "held_tokens", "prefix_source", "within_s", "leaves", "since")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    target_addresses: _containers.RepeatedScalarFieldContainer[str]
    target: str
    held_tokens: int
    prefix_source: PrefixSource
    within_s: float
    leaves: int
    since: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., target_addresses: _Optional[_Iterable[str]] = ..., target: _Optional[str] = ..., held_tokens: _Optional[int] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., within_s: _Optional[float] = ..., leaves: _Optional[int] = ..., since: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("peer", "addresses", "blocks", "is_pool_node")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_POOL_NODE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    is_pool_node: bool
    def __init__(self, peer: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ..., is_pool_node: _Optional[bool] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("spec", "within_s", "prefix_source", "displaced")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    within_s: float
    prefix_source: PrefixSource
    displaced: bool
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., within_s: _Optional[float] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., displaced: _Optional[bool] = ...) -> None: ...

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
    counters: _counters_pb2.Counters
    blocks: _containers.RepeatedCompositeFieldContainer[_pool_node_pb2.BlockChanges]
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., counters: _Optional[_Union[_counters_pb2.Counters, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[_pool_node_pb2.BlockChanges, _Mapping]]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("wire_version", "name", "incarnation", "role", "device", "transfer_addresses", "fingerprint", "block_size", "total_blocks", "max_model_len", "max_running_requests", "vocab_size", "transport", "architecture", "prefill_chunk_tokens", "mixed_chunk_tokens", "physical_format", "rope_border_tokens", "kv_token_bytes", "step_times", "cpus", "handoff_by_pool", "witness", "witness_key", "start", "is_new", "takes", "pool", "memory")
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
    MIXED_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ROPE_BORDER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BY_POOL_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    WITNESS_KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
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
    mixed_chunk_tokens: int
    physical_format: str
    rope_border_tokens: int
    kv_token_bytes: int
    step_times: _inference_pb2.StepTimes
    cpus: str
    handoff_by_pool: bool
    witness: str
    witness_key: str
    start: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PhaseSeconds]
    is_new: bool
    takes: PromptRule
    pool: str
    memory: _containers.RepeatedCompositeFieldContainer[_inference_pb2.MemoryPart]
    def __init__(self, wire_version: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., transfer_addresses: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., vocab_size: _Optional[int] = ..., transport: _Optional[str] = ..., architecture: _Optional[str] = ..., prefill_chunk_tokens: _Optional[int] = ..., mixed_chunk_tokens: _Optional[int] = ..., physical_format: _Optional[str] = ..., rope_border_tokens: _Optional[int] = ..., kv_token_bytes: _Optional[int] = ..., step_times: _Optional[_Union[_inference_pb2.StepTimes, _Mapping]] = ..., cpus: _Optional[str] = ..., handoff_by_pool: _Optional[bool] = ..., witness: _Optional[str] = ..., witness_key: _Optional[str] = ..., start: _Optional[_Iterable[_Union[_inference_pb2.PhaseSeconds, _Mapping]]] = ..., is_new: _Optional[bool] = ..., takes: _Optional[_Union[PromptRule, _Mapping]] = ..., pool: _Optional[str] = ..., memory: _Optional[_Iterable[_Union[_inference_pb2.MemoryPart, _Mapping]]] = ...) -> None: ...

class PromptRule(_message.Message):
    __slots__ = ("min_prompt_tokens", "max_prompt_tokens", "tiers")
    MIN_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    min_prompt_tokens: int
    max_prompt_tokens: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, min_prompt_tokens: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

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

class SetStateRequest(_message.Message):
    __slots__ = ("role", "drain_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    drain_s: float
    def __init__(self, role: _Optional[str] = ..., drain_s: _Optional[float] = ...) -> None: ...

class SetStateResponse(_message.Message):
    __slots__ = ("role", "role_epoch")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    role: str
    role_epoch: int
    def __init__(self, role: _Optional[str] = ..., role_epoch: _Optional[int] = ...) -> None: ...
