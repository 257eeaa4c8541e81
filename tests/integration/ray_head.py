"""A Ray head of a test's own, and what kvrelay leaves behind on it.

Every process that the head starts, and all of theirs, carry a mark in their environment, so that
whatever else runs on the machine is not looked at.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from uuid import uuid4

import psutil

from engine.device.kept_files import cache_folder
from tests.integration.ray_questions import Questions

BIN = Path(sys.executable).parent
MARK = "KVRELAY_TEST_MARK"
PATIENCE_S = 200.0
POLL_S = 0.1
NOTHING_BUILT = (*("--set", "engine.profile=off", "--set", "attention.backend=sdpa"),)
"""For a cluster that shall serve soon, though each HOME is a new one."""

Answer = TypeVar("Answer")
Environment = dict[str, str]


def until(ask: Callable[[], Answer], patience_s: float = PATIENCE_S) -> Answer:
    """The first true answer. Raises TimeoutError with the last one."""
    deadline_s = time.monotonic() + patience_s
    while not (answer := ask()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{answer!r} for {patience_s:g} s")
        time.sleep(POLL_S)
    return answer


def free_ports(count: int) -> list[int]:
    """Ports that no one listens on, below the range that Ray gives to its workers; processes that
    look for some at once, whose ids are alike, begin far from each other."""
    ports: list[int] = []
    candidates = iter(range(3000 + os.getpid() * 61 % 4000, 9000))
    while len(ports) < count:
        port = next(candidates)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
    return ports


@dataclass(frozen=True, slots=True)
class Marked:
    """An environment for commands, and the processes that inherited it."""

    env: Environment

    def run(self, *command: str | Path, timeout_s: float = PATIENCE_S) -> str:
        """stdout; raises CalledProcessError, with stderr shown, when the command fails."""
        done = subprocess.run(
            [*map(str, command)], env=self.env, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def start(self, *command: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """In a session of its own, as a terminal or a supervisor starts it."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [*map(str, command)],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All that have the mark, and theirs: Ray's workers overwrite their environment."""
        mark = f"{MARK}={self.env[MARK]}".encode()
        everyone = {process.pid: process for process in psutil.process_iter(["ppid"])}
        parents = {pid: process.info["ppid"] for pid, process in everyone.items()}
        marked = {pid for pid in everyone if mark in _environment(pid)}
        return [one for pid, one in everyone.items() if marked & {*_line(pid, parents)}]

    def left_of_kvrelay(self) -> list[str]:
        """Processes, memfds and UNIX sockets of kvrelay; empty when nothing is left."""
        left: list[str] = []
        sockets = _abstract_sockets()
        for process in self.processes():
            with suppress(psutil.Error, OSError):
                title = " ".join(process.cmdline())
                left += [title] if _is_kvrelay(title) else []
                left += [link for link in _links(process.pid, sockets) if "kvrelay-" in link]
                left += [line for line in _mapped(process.pid) if "kvrelay-" in line]
        return left


def _is_kvrelay(title: str) -> bool:
    hosts = ("ray::Controller", "ray::RouterHost", "ray::WorkerHost", "ray::PoolNodeHost")
    return title.startswith(hosts) or "bin/kvrelay" in title or "engine.parallel" in title


def _environment(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _line(pid: int, parents: Mapping[int, int | None]) -> Iterator[int]:
    """It, what started it, and so on."""
    at: int | None = pid
    while at:
        yield at
        at = parents.get(at)


def _links(pid: int, names: Mapping[str, str]) -> Iterator[str]:
    """What the open files of a process are; abstract sockets by their `names`."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            link = os.readlink(entry)
            yield names.get(link, link)


def _mapped(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _abstract_sockets() -> dict[str, str]:
    """# link of an open file |-> name of the UNIX socket"""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {f"socket:[{row[6]}]": row[7] for row in rows if len(row) > 7}


@contextmanager
def marked(**extra: str) -> Iterator[Marked]:
    """Own HOME and RAY_TMPDIR, but the user's cache, so that what was built once is built; whatever
    still runs at the end is killed."""
    with TemporaryDirectory(prefix="kv", ignore_cleanup_errors=True) as folder:
        home, tmp = Path(folder, "h"), Path(folder, "t")
        home.mkdir()
        tmp.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "KVRELAY_"))}
        env |= {
            "KVRELAY_TOKEN_FILE": os.environ["KVRELAY_TOKEN_FILE"],
            "HOME": str(home),
            "XDG_CACHE_HOME": str(cache_folder().parent),
            "RAY_TMPDIR": str(tmp),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # what else the machine runs ends no test
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_worker_niceness": "0",  # nor makes it wait: Ray's is 15
            MARK: uuid4().hex,
        }
        here = Marked(env | extra)
        try:
            yield here
        finally:
            while running := here.processes():
                _end(running)


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    marked: Marked
    address: str
    questions: Questions
    dashboard: str = ""
    """Its URL, if it has one."""

    def joined(self) -> Marked:
        """Commands that find this head, as a job's driver does."""
        return Marked(self.marked.env | {"RAY_ADDRESS": self.address})

    def status(self, name: str | None = None) -> dict[str, object] | None:
        """What `kvrelay status --format json` prints; None without such a cluster."""
        return self.questions.status(*(["--name", name] if name else []))  # type: ignore[return-value]

    def kv(self, name: str) -> dict[str, list[dict[str, object]]]:
        """What `kvrelay status --kv --format json` prints."""
        told = self.questions.status("--kv", "--name", name)
        assert isinstance(told, dict)
        return told

    def internal(self, name: str, port: str) -> str:
        """HOST:PORT of the first router's internal_http_port or internal_grpc_port."""
        status = self.status(name)
        assert status is not None
        router: dict[str, object] = status["routers"][0]  # type: ignore[index]
        return f"{router['internal_host']}:{router[port]}"


@contextmanager
def head_at(here: Marked, address: str, dashboard: str = "") -> Iterator[Head]:
    """Of a Ray that runs there, or will."""
    questions = Questions(here.env | {"RAY_ADDRESS": address})
    try:
        yield Head(marked=here, address=address, questions=questions, dashboard=dashboard)
    finally:
        questions.end()


@contextmanager
def ray_head(
    resources: dict[str, float], *, with_dashboard: bool = False, **extra: str
) -> Iterator[Head]:
    """A head with token authentication. A dashboard takes jobs and lists actors. `extra`: what is
    in the environment of its processes besides."""
    port, dashboard, client, agent = free_ports(4)
    with marked(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid4().hex, **extra) as here:
        here.run(
            *(BIN / "ray", "start", "--head", "--disable-usage-stats", "--num-cpus=4"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
            *("--object-store-memory=100000000", f"--resources={json.dumps(resources)}"),
            f"--include-dashboard={str(with_dashboard).lower()}",
        )
        url = f"http://127.0.0.1:{dashboard}" if with_dashboard else ""
        with head_at(here, f"127.0.0.1:{port}", url) as head:
            yield head
