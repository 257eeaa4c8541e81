from kvrelay.v1 import inference_pb2 as _inference_pb2
from kvrelay.v1 import pool_node_pb2 as _pool_node_pb2
from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
