from kvrelay.v1 import inference_pb2 as _inference_pb2
from kvrelay.v1 import pool_node_pb2 as _pool_node_pb2
from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
