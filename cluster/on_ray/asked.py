"""What travels between who asks for a change, a router, and the cluster's controller.

Light to import: a router passes it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.codec import EnvelopeCodec
from kvrelay.errors import InvalidRequest, PeerError
from kvrelay.types import Role
from kvrelay.v1.admin_pb2 import ChangeRequest, ChangeResponse
from router.grpc_api.changes import ChangeDenied


@dataclass(frozen=True, slots=True)
class ApplyFile:
    """The cluster shall be as this file, as JSON: what its controller can have of it, with the
    secrets that it has."""

    config: str
    only_tell: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """The pool shall have so many workers."""

    pool: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """This process shall leave. `replace`: another one takes its place, else its pool has one fewer
    from then on."""

    name: str
    replace: bool = True


@dataclass(frozen=True, slots=True)
class Flip:
    """The worker shall have this role."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Pending:
    """Nothing: which processes are not yet as desired?"""


Asked = ApplyFile | Scale | Drain | Flip | Pending
"""What travels."""
ASKED: EnvelopeCodec[Asked, ChangeRequest] = EnvelopeCodec(Asked, ChangeRequest, "a command")


@dataclass(frozen=True, slots=True)
class Granted:
    """What changes, a line for each pool."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Denied:
    reason: str


def wish_of(asked: ChangeRequest) -> Asked:
    """Raises InvalidRequest."""
    try:
        return ASKED.decode(asked)
    except PeerError as error:
        raise InvalidRequest(str(error), param="wish") from None


def told(answer: Granted | Denied) -> ChangeResponse:
    """Raises ChangeDenied."""
    if isinstance(answer, Denied):
        raise ChangeDenied(answer.reason)
    return ChangeResponse(lines=answer.lines)
