"""Gives the files of this worker's checkpoint to workers that start on other hosts.

What `Read` answers is not protobuf, which copies each piece twice, into fresh memory: 1.8 s of CPU
time for a GB, where the bytes alone take 0.7 s. A worker's steps need that CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from engine.core.checkpoint_files import CheckpointOffer
from engine.model.hub_cache import MAIN, commit_of, needed_files
from kvrelay.access.values import Access
from kvrelay.codec import MessageCodec
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc

OFFERS = MessageCodec(CheckpointOffer, pb.CheckpointOffer, "a worker")
SERVICE = pb.DESCRIPTOR.services_by_name["Checkpoints"].full_name
PIECE_BYTES = 1 << 20
"""Reading goes on while one is sent, so a reader takes a few of these in memory."""
MOST_READERS = 2
"""More would take too much of the worker's link and CPU; they have other workers and the hub."""


class OwnCheckpoint:
    """What this worker has of its model, once it is known."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._model, self._revision = model, revision
        self._folder: Path | None = None
        self._hub_bytes_per_s: float | None = None

    def found(self, folder: Path, hub_bytes_per_s: float | None) -> None:
        self._folder, self._hub_bytes_per_s = folder, hub_bytes_per_s

    def offer(self, model: str, revision: str | None) -> CheckpointOffer:
        """As its host's cache is now. Raises LookupError for what it does not have."""
        folder = self._folder
        commit = None if folder is None else commit_of(folder, self._model)
        if folder is None or commit is None:
            raise LookupError("this worker's model is not in a hub's cache")
        own = self._revision or MAIN
        if model != self._model or (revision or MAIN) not in (own, commit):
            raise LookupError(f"this worker has {self._model}, revision {own}")
        try:
            files = needed_files(folder)
        except (ValueError, OSError) as error:
            raise LookupError(str(error)) from None
        return CheckpointOffer(commit=commit, files=files, hub_bytes_per_s=self._hub_bytes_per_s)

    def paths(self, commit: str, names: list[str]) -> list[Path]:
        """Of files that are offered, and of nothing else. Raises LookupError."""
        folder = self._folder
        offer = self.offer(self._model, self._revision)
        assert folder is not None, "offered"
        if commit != offer.commit:
            raise LookupError(f"not offered: commit {commit!r}")
        if unknown := {*names} - {file.name for file in offer.files}:
            raise LookupError(f"not offered: {', '.join(sorted(unknown))}")
        return [folder / name for name in names]


class CheckpointService(worker_pb2_grpc.CheckpointsServicer):
    def __init__(self, own: OwnCheckpoint) -> None:
        self._own = own
        self._readers = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_CheckpointsServicer_to_server(self, server)
        read = grpc.unary_stream_rpc_method_handler(
            self._read, request_deserializer=pb.ReadCheckpoint.FromString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Read": read}),)
        )

    async def Offer(  # noqa: N802
        self, request: pb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckpointOffer:
        revision = request.revision if request.HasField("revision") else None
        try:
            offer = await asyncio.to_thread(self._own.offer, request.model, revision)
        except LookupError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return OFFERS.encode(offer)

    async def _read(
        self, request: pb.ReadCheckpoint, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """RESOURCE_EXHAUSTED: enough others read already. NOT_FOUND: a file or commit is not
        offered."""
        if self._readers >= MOST_READERS:
            told = f"{MOST_READERS} workers read here already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told)
        self._readers += 1
        try:
            paths = await asyncio.to_thread(self._own.paths, request.commit, [*request.names])
            for path in paths:
                with path.open("rb", buffering=0) as file:
                    while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                        yield data
        except LookupError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        finally:
            self._readers -= 1


def read_files(
    channel: grpc.Channel, request: pb.ReadCheckpoint, access: Access
) -> grpc.CallIterator[bytes]:
    """The files' bytes, in their order."""
    method = channel.unary_stream(
        f"/{SERVICE}/Read", request_serializer=pb.ReadCheckpoint.SerializeToString
    )
    return method(request, metadata=access.metadata)
