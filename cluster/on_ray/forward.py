"""What a router is asked to change, it passes on to its cluster's controller, whose actor Ray finds
by its name: a controller that Ray has started again too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from cluster.on_ray.asked import ASKED, Asked, Denied, Granted
from kvrelay.errors import InvalidRequest, PeerError
from kvrelay.v1.admin_pb2 import ChangeRequest, ChangeResponse
from router.grpc_api.changes import ChangeDenied, NobodyAnswers

ANSWER_S = 45.0
"""Ray needs a few seconds to start a controller again. It gets what was asked meanwhile."""


@dataclass(frozen=True, slots=True)
class ToController:
    """Implements Changes. `name` and `namespace` are those of the controller's actor."""

    name: str
    namespace: str

    async def change(self, asked: ChangeRequest) -> ChangeResponse:
        answer = await self._answer(_wish_of(asked))
        if isinstance(answer, Denied):
            raise ChangeDenied(answer.reason)
        return ChangeResponse(lines=answer.lines)

    async def _answer(self, wish: Asked) -> Granted | Denied:
        try:
            found = await asyncio.to_thread(ray.get_actor, self.name, self.namespace)
            answer: Granted | Denied = await asyncio.wait_for(found.wish.remote(wish), ANSWER_S)
        except TimeoutError:
            raise NobodyAnswers(
                f"{self.name} has not answered for {ANSWER_S:g} s, and may still do it: see "
                "kvrelay top, and ask again"
            ) from None
        except (ValueError, RayError):
            raise NobodyAnswers(
                f"{self.name} does not answer: the cluster stops, or has lost its controller"
            ) from None
        return answer


def _wish_of(asked: ChangeRequest) -> Asked:
    try:
        return ASKED.decode(asked)
    except PeerError as error:
        raise InvalidRequest(str(error), param="wish") from None
