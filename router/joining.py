"""Whether a worker can serve together with those that are here, before any request is. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.block_names import NamedFormat
from kvrelay.errors import PeerError
from kvrelay.messages import WorkerHello
from kvrelay.types import Role


def check_joins(hello: WorkerHello, others: Iterable[WorkerHello]) -> None:
    """Raises PeerError, saying what differs and what to do."""
    for other in others:
        if other.fingerprint != hello.fingerprint:
            raise PeerError(
                f"worker {hello.name} serves another model than {other.name} "
                f"(fingerprint {hello.fingerprint}, not {other.fingerprint})"
            )
        if {hello.role, other.role} == {Role.PREFILL, Role.DECODE}:
            _check_formats(hello, other)


def _check_formats(hello: WorkerHello, other: WorkerHello) -> None:
    """KV would be handed over between these two."""
    ours, theirs = (NamedFormat.of(one.physical_format) for one in (hello, other))
    if ours.dtype != theirs.dtype and not (ours.mixed_precision and theirs.mixed_precision):
        raise PeerError(
            f"worker {hello.name} has KV in {ours.dtype}, {other.name} in {theirs.dtype}: give "
            "both the same dtype, or set transfer.allow_mixed_precision: true on both to have it "
            "converted"
        )
