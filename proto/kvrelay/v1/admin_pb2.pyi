from kvrelay.v1 import inference_pb2 as _inference_pb2
from kvrelay.v1 import pool_node_pb2 as _pool_node_pb2
from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_SILENT: _ClassVar[WorkerState]
    WORKER_STATE_QUARANTINED: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_SILENT: WorkerState
WORKER_STATE_QUARANTINED: WorkerState

class OfferedWork(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "prompt_squares", "prompt_pairs", "output_tokens", "context_tokens", "ttft_s", "with_ttft", "tpot_s", "with_tpot")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SQUARES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PAIRS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    WITH_TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    WITH_TPOT_FIELD_NUMBER: _ClassVar[int]
    requests: float
    prompt_tokens: float
    prompt_squares: float
    prompt_pairs: float
    output_tokens: float
    context_tokens: float
    ttft_s: float
    with_ttft: float
    tpot_s: float
    with_tpot: float
    def __init__(self, requests: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., prompt_squares: _Optional[float] = ..., prompt_pairs: _Optional[float] = ..., output_tokens: _Optional[float] = ..., context_tokens: _Optional[float] = ..., ttft_s: _Optional[float] = ..., with_ttft: _Optional[float] = ..., tpot_s: _Optional[float] = ..., with_tpot: _Optional[float] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class WatchReport(_message.Message):
    __slots__ = ("cluster", "version", "uptime_s", "not_ready", "leaving", "open_requests", "waiting_requests", "queued_prompts", "tiers", "workers", "quarantined")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    version: str
    uptime_s: float
    not_ready: str
    leaving: bool
    open_requests: int
    waiting_requests: int
    queued_prompts: int
    tiers: _containers.RepeatedCompositeFieldContainer[WatchedTier]
    workers: _containers.RepeatedCompositeFieldContainer[WatchedWorker]
    quarantined: _containers.RepeatedCompositeFieldContainer[_inference_pb2.QuarantinedPair]
    def __init__(self, cluster: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., not_ready: _Optional[str] = ..., leaving: _Optional[bool] = ..., open_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., queued_prompts: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[WatchedTier, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WatchedWorker, _Mapping]]] = ..., quarantined: _Optional[_Iterable[_Union[_inference_pb2.QuarantinedPair, _Mapping]]] = ...) -> None: ...

class WatchedTier(_message.Message):
    __slots__ = ("name", "open_requests", "admitted", "refused", "offered")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    name: str
    open_requests: int
    admitted: int
    refused: int
    offered: OfferedWork
    def __init__(self, name: _Optional[str] = ..., open_requests: _Optional[int] = ..., admitted: _Optional[int] = ..., refused: _Optional[int] = ..., offered: _Optional[_Union[OfferedWork, _Mapping]] = ...) -> None: ...

class WatchedWorker(_message.Message):
    __slots__ = ("info", "role_epoch", "state", "heard_ago_s", "waiting_tokens", "prefill_token_s", "decode_step_s", "hello")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGO_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    info: _inference_pb2.WorkerInfo
    role_epoch: int
    state: WorkerState
    heard_ago_s: float
    waiting_tokens: int
    prefill_token_s: float
    decode_step_s: float
    hello: _worker_pb2.WorkerHello
    def __init__(self, info: _Optional[_Union[_inference_pb2.WorkerInfo, _Mapping]] = ..., role_epoch: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., heard_ago_s: _Optional[float] = ..., waiting_tokens: _Optional[int] = ..., prefill_token_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., hello: _Optional[_Union[_worker_pb2.WorkerHello, _Mapping]] = ...) -> None: ...

class SetWorkerRequest(_message.Message):
    __slots__ = ("worker", "state")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    state: _worker_pb2.SetStateRequest
    def __init__(self, worker: _Optional[str] = ..., state: _Optional[_Union[_worker_pb2.SetStateRequest, _Mapping]] = ...) -> None: ...

class ChangeRequest(_message.Message):
    __slots__ = ("apply", "scale", "drain", "flip", "pending", "drain_s")
    class ApplyFile(_message.Message):
        __slots__ = ("config", "only_tell")
        CONFIG_FIELD_NUMBER: _ClassVar[int]
        ONLY_TELL_FIELD_NUMBER: _ClassVar[int]
        config: str
        only_tell: bool
        def __init__(self, config: _Optional[str] = ..., only_tell: _Optional[bool] = ...) -> None: ...
    class Scale(_message.Message):
        __slots__ = ("pool", "count")
        POOL_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        pool: str
        count: int
        def __init__(self, pool: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
    class Drain(_message.Message):
        __slots__ = ("name", "replace")
        NAME_FIELD_NUMBER: _ClassVar[int]
        REPLACE_FIELD_NUMBER: _ClassVar[int]
        name: str
        replace: bool
        def __init__(self, name: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...
    class Flip(_message.Message):
        __slots__ = ("name", "role")
        NAME_FIELD_NUMBER: _ClassVar[int]
        ROLE_FIELD_NUMBER: _ClassVar[int]
        name: str
        role: str
        def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...
    class Pending(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    APPLY_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FLIP_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    apply: ChangeRequest.ApplyFile
    scale: ChangeRequest.Scale
    drain: ChangeRequest.Drain
    flip: ChangeRequest.Flip
    pending: ChangeRequest.Pending
    drain_s: float
    def __init__(self, apply: _Optional[_Union[ChangeRequest.ApplyFile, _Mapping]] = ..., scale: _Optional[_Union[ChangeRequest.Scale, _Mapping]] = ..., drain: _Optional[_Union[ChangeRequest.Drain, _Mapping]] = ..., flip: _Optional[_Union[ChangeRequest.Flip, _Mapping]] = ..., pending: _Optional[_Union[ChangeRequest.Pending, _Mapping]] = ..., drain_s: _Optional[float] = ...) -> None: ...

class ChangeResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lines: _Optional[_Iterable[str]] = ...) -> None: ...

class TraceRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class TraceRequestResponse(_message.Message):
    __slots__ = ("stories", "left_out")
    STORIES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    stories: _containers.RepeatedCompositeFieldContainer[RequestStory]
    left_out: int
    def __init__(self, stories: _Optional[_Iterable[_Union[RequestStory, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class RequestStory(_message.Message):
    __slots__ = ("request_id", "age_s", "left_out", "events")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age_s: float
    left_out: int
    events: _containers.RepeatedCompositeFieldContainer[StoryEvent]
    def __init__(self, request_id: _Optional[str] = ..., age_s: _Optional[float] = ..., left_out: _Optional[int] = ..., events: _Optional[_Iterable[_Union[StoryEvent, _Mapping]]] = ...) -> None: ...

class StoryEvent(_message.Message):
    __slots__ = ("at_s", "moment", "workers", "reason", "times", "last_s")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    moment: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    times: int
    last_s: float
    def __init__(self, at_s: _Optional[float] = ..., moment: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., times: _Optional[int] = ..., last_s: _Optional[float] = ...) -> None: ...

class GetKvRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetKvResponse(_message.Message):
    __slots__ = ("workers", "pool_nodes", "silent")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    POOL_NODES_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_worker_pb2.DebugKvResponse]
    pool_nodes: _containers.RepeatedCompositeFieldContainer[_pool_node_pb2.PoolReport]
    silent: _containers.RepeatedCompositeFieldContainer[SilentProcess]
    def __init__(self, workers: _Optional[_Iterable[_Union[_worker_pb2.DebugKvResponse, _Mapping]]] = ..., pool_nodes: _Optional[_Iterable[_Union[_pool_node_pb2.PoolReport, _Mapping]]] = ..., silent: _Optional[_Iterable[_Union[SilentProcess, _Mapping]]] = ...) -> None: ...

class SilentProcess(_message.Message):
    __slots__ = ("address", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    error: str
    def __init__(self, address: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...
