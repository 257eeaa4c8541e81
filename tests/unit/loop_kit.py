"""What a worker's loop must not do, and peers that hang."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess
from types import FrameType
from uuid import uuid4

from cluster.worker.peers import PeerLinks
from kvpool.core.transfer.messages import PeerHello
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.transport.endpoints import EndpointOptions
from kvrelay.types import WIRE_VERSION, Incarnation
from tests.forks import forks

KNOWN = EndpointOptions(secret=b"known")

MOST_S = 0.02
"""A call of the loop takes no longer."""
ROUNDS = 5
"""A busy machine may stop any thread for longer: one round in so many must be in time."""
_WAITING = {"wait", "wait_for", "join", "result", "acquire"}


class Waited(AssertionError):
    pass


def _may_wait(frame: FrameType, event: str, called: object) -> str | None:
    """What this call would wait for; None: nothing. A thread that is started takes its time."""
    if event == "c_call":
        owner = getattr(called, "__self__", None)
        name = getattr(called, "__name__", "")
        if isinstance(owner, socket.socket) or called is time.sleep:
            return name
        return None
    in_threading = frame.f_code.co_filename == threading.__file__
    if event == "call" and in_threading and frame.f_code.co_name in _WAITING:
        return None if _starts_a_thread(frame) else frame.f_code.co_name
    return None


def _starts_a_thread(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code.co_name == "start":
            return True
        frame = frame.f_back
    return False


@contextmanager
def never_waits() -> Iterator[None]:
    """Within, this thread neither sleeps nor waits for others nor touches a socket."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, called: object) -> None:
        if waits := _may_wait(frame, event, called):
            found.append(f"{waits} in {frame.f_code.co_qualname}")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
    if found:
        raise Waited(f"the loop would wait: {', '.join(found)}")


def in_time(call: Callable[[], object]) -> None:
    """It never waits, and takes at most MOST_S."""
    took_s = []
    for _ in range(ROUNDS):
        with never_waits():
            call()
        started_s = time.monotonic()
        call()
        took_s.append(time.monotonic() - started_s)
        if took_s[-1] <= MOST_S:
            return
    raise Waited(f"took {', '.join(f'{1e3 * s:.0f} ms' for s in took_s)}")


# --- peers --------------------------------------------------------------------------------------


def peer_hello(name: str) -> PeerHello:
    return PeerHello(
        wire_version=WIRE_VERSION,
        incarnation=Incarnation(f"{name}-{uuid4().hex}"),
        fingerprint="f00d",
        kv=KvFacts(dtype="float32", block_size=16, blocks=8, slab_bytes=1024),
        name=name,
    )


@contextmanager
def deaf_listener(scheme: str) -> Iterator[tuple[Incarnation, str]]:
    """The kernel takes connections to its address, and nobody answers."""
    name = Incarnation(f"deaf-{uuid4().hex}")
    if scheme == "shm":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0kvrelay-shm:{name}".encode())
            listener.listen()
            yield name, f"shm:{name}"
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield name, f"{scheme}:127.0.0.1:{listener.getsockname()[1]}/{name}"


def _live(scheme: str, end: Pipe) -> None:
    hello = peer_hello("stopped")
    links = PeerLinks([scheme], hello, lambda event: None, options=KNOWN)
    end.send((hello.incarnation, links.endpoints.addresses))
    with suppress(EOFError):
        end.recv()


class OtherProcess:
    """A worker's links in a process of their own."""

    def __init__(self, process: ForkServerProcess, told: tuple[Incarnation, tuple[str, ...]]):
        self._process = process
        self.incarnation, self.addresses = told

    def stop(self) -> None:
        """As SIGSTOP does, and waits until it stands still."""
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with open(f"/proc/{pid}/stat") as stat:
            while stat.read().rpartition(")")[2].split()[0] != "T":
                stat.seek(0)
                time.sleep(0.001)


@contextmanager
def other_process(scheme: str) -> Iterator[OtherProcess]:
    ours, theirs = forks().Pipe()
    process = forks().Process(target=_live, args=(scheme, theirs))
    process.start()
    theirs.close()
    try:
        yield OtherProcess(process, ours.recv())
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()
