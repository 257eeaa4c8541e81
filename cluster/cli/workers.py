"""What a router tells one of its workers, for `kvrelay drain` and `kvrelay flip`."""

from __future__ import annotations

import time

from cluster.process.admin import ask
from kvrelay.access.values import Access
from kvrelay.types import Role
from kvrelay.v1.admin_pb2 import SetWorkerRequest
from kvrelay.v1.inference_pb2 import GetServerInfoRequest
from kvrelay.v1.worker_pb2 import SetStateRequest, SetStateResponse

ANSWER_S = 30.0
LOOK_S = 0.1


def flip(worker: str, role: Role, router: str, access: Access) -> None:
    """Raises ConfigError without an answer, NotKnown for another name, NotPossible for a role that
    it can't have beside the others."""
    _tell(worker, SetStateRequest(role=role), router, access)


def drain(worker: str, router: str, access: Access, drain_s: float, *, wait: bool) -> None:
    """Until it has left this router, if it is to `wait`. Raises like `flip`."""
    before = _incarnations(worker, router, access)
    _tell(worker, SetStateRequest(drain_s=drain_s), router, access)
    while wait and before & _incarnations(worker, router, access):
        time.sleep(LOOK_S)


def _tell(worker: str, wanted: SetStateRequest, router: str, access: Access) -> SetStateResponse:
    request = SetWorkerRequest(worker=worker, state=wanted)
    return ask(router, lambda stub: stub.SetWorker, request, access, timeout_s=ANSWER_S)


def _incarnations(worker: str, router: str, access: Access) -> set[str]:
    """Of the workers that have this name, as the router knows them."""
    request = GetServerInfoRequest()
    found = ask(router, lambda stub: stub.GetServerInfo, request, access, timeout_s=ANSWER_S)
    return {one.incarnation for one in found.workers if one.name == worker}
