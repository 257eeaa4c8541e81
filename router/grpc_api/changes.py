"""Who changes the cluster as `Admin.Change` asks: its controller; without one, this router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc

from kvrelay.errors import InvalidRequest, KvrelayError, PeerError
from kvrelay.v1.admin_pb2 import ChangeRequest, ChangeResponse
from kvrelay.v1.worker_pb2 import SetStateRequest
from router.core.state.generation import Dispatcher

NO_CONTROLLER = "this router's processes have no controller"
NUMBER = (
    f"{NO_CONTROLLER}: whoever starts them says how many there are; of a Deployment, "
    "kubectl scale deployment NAME --replicas=N"
)
FILE = f"{NO_CONTROLLER}: each reads the file when it starts, so start them again with the new one"


class ChangeDenied(KvrelayError):
    """It can't be, for the given reason."""


class NobodyAnswers(KvrelayError):
    """Whoever changes the cluster does not answer now."""


class Changes(Protocol):
    async def change(self, asked: ChangeRequest) -> ChangeResponse:
        """Raises InvalidRequest, LookupError for a worker that is unknown or doesn't answer,
        ChangeDenied, NobodyAnswers."""


async def answered(
    changes: Changes, asked: ChangeRequest, context: grpc.aio.ServicerContext
) -> ChangeResponse:
    """For `Admin.Change`: ends the call with the reason where it can't be."""
    try:
        return await changes.change(asked)
    except LookupError as error:
        code, told = grpc.StatusCode.NOT_FOUND, str(error.args[0])
    except InvalidRequest as error:
        code, told = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except ChangeDenied as error:
        code, told = grpc.StatusCode.FAILED_PRECONDITION, str(error)
    except NobodyAnswers as error:
        code, told = grpc.StatusCode.ABORTED, str(error)
    raise await context.abort(code, told)


@dataclass(frozen=True, slots=True)
class OfProcesses:
    """Implements Changes: drains and flips the workers of this router, for nobody remembers more
    of them."""

    dispatcher: Dispatcher

    async def change(self, asked: ChangeRequest) -> ChangeResponse:
        worker, wanted = _told(asked)
        try:
            await self.dispatcher.set_worker(worker, wanted)
        except (PeerError, ValueError) as error:
            raise ChangeDenied(str(error)) from None
        return ChangeResponse()


def _told(asked: ChangeRequest) -> tuple[str, SetStateRequest]:
    """The worker, and what it is told. Raises InvalidRequest and ChangeDenied."""
    match asked.WhichOneof("wish"):
        case "flip":
            return asked.flip.name, SetStateRequest(role=asked.flip.role)
        case "drain" if asked.drain.replace:
            return asked.drain.name, SetStateRequest(drain_s=asked.drain_s)
        case "apply":
            raise ChangeDenied(FILE)
        case "drain" | "scale":
            raise ChangeDenied(NUMBER)
        case _:
            raise InvalidRequest("nothing is wished", param="wish")
