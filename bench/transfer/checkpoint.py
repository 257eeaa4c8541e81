"""A checkpoint's files from one worker to another, between two processes and two hub caches on this
machine, beside what bounds it: a copy of the same files, and one with their digests.

Also beside plain TCP with sendfile, the least that a sender can do. The CPU time of the process
that serves is what its steps may feel.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.report import Reading, Row, interleave, print_table, write_json
from cluster.process.net import grpc_server
from cluster.worker.checkpoint.fetch import FromPeers
from cluster.worker.checkpoint.service import CheckpointService, OwnCheckpoint
from engine.core.activity import unheard
from engine.core.checkpoint_files import CheckpointFile
from engine.model.hub_cache import HubCache
from kvrelay.access.values import Access

HUB_ID = "bench/model"
COMMIT = "b" * 40
ACCESS = Access(token=bytes(range(32)))
FILES = 4
BUFFER_BYTES = 1 << 20
GB = 1e9


def write_model(root: Path, nbytes: int) -> list[CheckpointFile]:
    """Into a hub cache at `root`, of random bytes."""
    cache, files = HubCache(HUB_ID, root), []
    for number in range(FILES):
        content = os.urandom(nbytes // FILES)
        digest = hashlib.sha256(content).hexdigest()
        name = f"model-{number}.safetensors"
        file = CheckpointFile(name=name, digest=digest, nbytes=len(content))
        arriving = cache.receive(file)
        arriving.write(content)
        arriving.keep()
        files.append(file)
    cache.link(COMMIT, files)
    return files


# --- the process that serves -------------------------------------------------------------------


async def serve(root: Path) -> None:
    own = OwnCheckpoint(HUB_ID, None)
    own.found(HubCache(HUB_ID, root).snapshot(COMMIT), None)
    server = grpc_server(ACCESS)
    CheckpointService(own).add_to(server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def send_files(root: Path) -> None:
    """To whoever connects, by sendfile."""
    paths = sorted(HubCache(HUB_ID, root).snapshot(COMMIT).iterdir())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                for path in paths:
                    with path.open("rb") as file:
                        connection.sendfile(file)


@contextmanager
def sending(kind: str, root: Path) -> Iterator[tuple[psutil.Process, int]]:
    """The process, and its port."""
    command = [sys.executable, "-m", "bench.transfer.checkpoint", "--serve", kind, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield psutil.Process(process.pid), int(process.stdout.readline())
        finally:
            process.kill()


# --- what is measured --------------------------------------------------------------------------


class _Known(FromPeers):
    """Its one worker is known without a router."""

    def __init__(self, address: str) -> None:
        super().__init__(tuple, ACCESS, unheard)
        self._known = [address]

    def _peers(self) -> list[str]:
        return self._known


def fetch(port: int, home: Path) -> None:
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = str(home)
    given = _Known(f"127.0.0.1:{port}").fetch(HUB_ID, None)
    assert given is not None and given.folder is not None, "all of it has come"


def receive(port: int, home: Path, files: list[CheckpointFile]) -> None:
    cache, buffer = HubCache(HUB_ID, home), bytearray(BUFFER_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for file in sorted(files, key=lambda file: file.name):
            arriving, left = cache.receive(file), file.nbytes
            while left:
                count = connection.recv_into(buffer, min(left, BUFFER_BYTES))
                arriving.write(bytes(memoryview(buffer)[:count]))
                left -= count
            arriving.keep()


def copy(root: Path, home: Path, *, digests: bool) -> None:
    home.mkdir(parents=True)
    buffer = bytearray(BUFFER_BYTES)
    for path in sorted(HubCache(HUB_ID, root).snapshot(COMMIT).iterdir()):
        digest = hashlib.sha256()
        with path.open("rb", 0) as source, (home / path.name).open("wb", 0) as target:
            while count := source.readinto(buffer):
                part = memoryview(buffer)[:count]
                if digests:
                    digest.update(part)
                target.write(part)


def timed(work: Callable[[Path], None], home: Path) -> float:
    shutil.rmtree(home, ignore_errors=True)
    started_s = time.perf_counter()
    work(home)
    return time.perf_counter() - started_s


def measure(root: Path, home: Path, nbytes: int, repeats: int) -> list[Row]:
    files = write_model(root, nbytes)
    with sending("grpc", root) as (peer, port), sending("tcp", root) as (_, plain):
        before = peer.cpu_times()
        found = interleave(
            {
                "fetch": lambda: timed(lambda to: fetch(port, to), home),
                "copy": lambda: timed(lambda to: copy(root, to, digests=False), home),
                "digests": lambda: timed(lambda to: copy(root, to, digests=True), home),
                "tcp": lambda: timed(lambda to: receive(plain, to, files), home),
            },
            repeats=repeats,
        )
        after = peer.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    speed = {
        name: Reading(values=tuple(nbytes / GB / value for value in reading.values))
        for name, reading in found.items()
    }
    return [
        *(
            _row(speed["fetch"], against, speed[name])
            for name, against in (
                ("digests", "a copy with digests"),
                ("copy", "a copy"),
                ("tcp", "sendfile over TCP, with digests"),
            )
        ),
        Row(
            name="CPU time of the worker that serves",
            value=used_s / (repeats * nbytes / GB),
            unit="s/GB",
            lower_is_better=True,
        ),
    ]


def _row(speed: Reading, against: str, other: Reading) -> Row:
    return Row(
        name="a checkpoint from a worker to another",
        value=speed.median,
        unit="GB/s",
        against=against,
        against_value=other.median,
        method="two processes and caches on one machine, files in the page cache",
        spread=f"{speed.spread()}; {other.spread()}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        kind, root = args.serve
        asyncio.run(serve(Path(root))) if kind == "grpc" else send_files(Path(root))
        return
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        rows = measure(here / "there", here / "here", args.mib << 20, args.repeats)
    print_table("A checkpoint from a worker", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
