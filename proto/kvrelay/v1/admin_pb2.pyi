from kvrelay.v1 import inference_pb2 as _inference_pb2
from kvrelay.v1 import pool_node_pb2 as _pool_node_pb2
from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDemandRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDemandResponse(_message.Message):
    __slots__ = ("tiers", "workers")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierDemand]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDemand]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierDemand, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerDemand, _Mapping]]] = ...) -> None: ...

class TierDemand(_message.Message):
    __slots__ = ("tier", "offered")
    TIER_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    offered: OfferedWork
    def __init__(self, tier: _Optional[str] = ..., offered: _Optional[_Union[OfferedWork, _Mapping]] = ...) -> None: ...

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

class WorkerDemand(_message.Message):
    __slots__ = ("hello", "role", "draining", "running", "waiting_tokens")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hello: _worker_pb2.WorkerHello
    role: str
    draining: bool
    running: int
    waiting_tokens: int
    def __init__(self, hello: _Optional[_Union[_worker_pb2.WorkerHello, _Mapping]] = ..., role: _Optional[str] = ..., draining: _Optional[bool] = ..., running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class SetWorkerRequest(_message.Message):
    __slots__ = ("worker", "state")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    state: _worker_pb2.SetStateRequest
    def __init__(self, worker: _Optional[str] = ..., state: _Optional[_Union[_worker_pb2.SetStateRequest, _Mapping]] = ...) -> None: ...

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
