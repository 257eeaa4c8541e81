"""Calls of a router's internal gRPC API, kvrelay.v1.Admin, for commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from kvrelay.access.tls import blocking_channel
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.types import Role
from kvrelay.v1.admin_pb2 import (
    ChangeRequest,
    SetWorkerRequest,
    WatchClusterRequest,
    WatchReport,
)
from kvrelay.v1.admin_pb2_grpc import AdminStub
from kvrelay.v1.worker_pb2 import SetStateRequest

NOT_INTERNAL = "not the internal gRPC address of a router, which kvrelay router prints"
IMPOSSIBLE = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
)
FINAL = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
)
MESSAGE_BYTES = 64 * 1024 * 1024
Answer = TypeVar("Answer")


class NotKnown(KvrelayError):
    """The router answers, and does not know what it was asked about, or can't reach it now."""


class NotPossible(KvrelayError):
    """The router answers why it can't be."""


def ask(
    address: str,
    method: Callable[[AdminStub], Callable[..., Answer]],
    request: object,
    access: Access,
    *,
    timeout_s: float,
) -> Answer:
    """Raises ConfigError when no router answers at HOST:PORT, or not to us, and NotKnown."""
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
    with blocking_channel(address, access.dials, options) as channel:
        try:
            stub = AdminStub(channel)
            return method(stub)(request, timeout=timeout_s, metadata=access.metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotKnown(error.details()) from None
            if error.code() in IMPOSSIBLE:
                raise NotPossible(error.details()) from None
            raise ConfigError(f"{address}: {reason_of(error)}") from None


def reason_of(error: grpc.RpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return NOT_INTERNAL
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return str(error.details())
    return f"no router answers: {error.details()}"


PING_S = 5.0


@contextmanager
def open_watch(address: str, interval_s: float, access: Access) -> Iterator[Iterator[WatchReport]]:
    """What a router reports until it stops. Reading raises grpc.RpcError when it is lost, and
    NotPossible for what it refuses."""
    pings = [("grpc.keepalive_time_ms", int(1000 * PING_S)), ("grpc.keepalive_timeout_ms", 5000)]
    with blocking_channel(address, access.dials, pings) as channel:
        request = WatchClusterRequest(interval_s=interval_s)
        try:
            yield AdminStub(channel).Watch(request, metadata=access.metadata)
        except grpc.RpcError as error:
            if error.code() in FINAL:
                raise NotPossible(f"{address}: {_told_by(error)}") from None
            raise


def report(address: str, access: Access, *, timeout_s: float) -> WatchReport:
    """What a router knows now. Raises like `ask`."""

    def first(stub: AdminStub) -> Callable[..., WatchReport]:
        return lambda request, **options: next(stub.Watch(request, **options))

    return ask(address, first, WatchClusterRequest(interval_s=1.0), access, timeout_s=timeout_s)


def _told_by(error: grpc.RpcError) -> str:
    known = error.code() is not grpc.StatusCode.INVALID_ARGUMENT
    return reason_of(error) if known else str(error.details())


# --- what changes a cluster --------------------------------------------------------------------

ANSWER_S = 30.0
CHANGE_S = 60.0
"""Longer than a router waits for its controller."""
LOOK_S = 0.1
SETTLE_S = 0.5


def change(wanted: ChangeRequest, router: str, access: Access) -> tuple[str, ...]:
    """What changes, in words. Raises ConfigError without an answer, NotKnown for an unknown worker,
    NotPossible for what can't be."""
    answer = ask(router, lambda stub: stub.Change, wanted, access, timeout_s=CHANGE_S)
    return tuple(answer.lines)


def wait_settled(router: str, access: Access, say: Callable[[str], None]) -> None:
    """Until the controller says that every process is there as desired, and serves. `say` hears
    what they do. The router itself may be replaced meanwhile. Raises like `change`."""
    told: set[str] = set()
    while lines := _pending(router, access):
        for line in lines:
            if line not in told:
                say(line)
        told = {*lines}
        time.sleep(SETTLE_S)


def _pending(router: str, access: Access) -> tuple[str, ...]:
    until_s = time.monotonic() + CHANGE_S
    while True:
        try:
            return change(ChangeRequest(pending=ChangeRequest.Pending()), router, access)
        except ConfigError:
            if time.monotonic() > until_s:
                raise
            time.sleep(SETTLE_S)


def drain(wanted: ChangeRequest, router: str, access: Access, *, wait: bool) -> tuple[str, ...]:
    """`change`. If it is to `wait`: until the worker has left this router; what is no worker there
    has left when the controller says that all is as desired."""
    worker = wanted.drain.name
    before = _incarnations(worker, router, access)
    told = change(wanted, router, access)
    if wait and not before:
        wait_settled(router, access, lambda _: None)
    while wait and before & _incarnations(worker, router, access):
        time.sleep(LOOK_S)
    return told


def _incarnations(worker: str, router: str, access: Access) -> set[str]:
    """Of the workers that have this name, as the router knows them."""
    infos = [one.info for one in report(router, access, timeout_s=ANSWER_S).workers]
    return {one.incarnation for one in infos if one.name == worker}


def flip(worker: str, role: Role, router: str, access: Access) -> None:
    """Of those who keep the roles: the worker is told by the router. Raises like `change`."""
    request = SetWorkerRequest(worker=worker, state=SetStateRequest(role=role))
    ask(router, lambda stub: stub.SetWorker, request, access, timeout_s=ANSWER_S)
