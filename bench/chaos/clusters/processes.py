"""Processes that are started again when they end, as systemd would do it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

MARK = "KVRELAY_CHAOS"
RESTART_AFTER_S = 1.0
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that ended. `asked`: by a fault or by the bench."""

    name: str
    at_s: float
    code: int
    asked: bool

    def __str__(self) -> str:
        return f"{self.name} ended with {self.code}"


@dataclass(slots=True, kw_only=True)
class Process:
    """`ready`: a pattern of its log whose first group is its address, once it serves."""

    name: str
    role: str
    command: Sequence[str]
    log: Path
    ready: str
    environment: Mapping[str, str]
    starts: int = 0
    stopped: bool = False
    killed: bool = False
    ends: list[Ended] = field(default_factory=list)
    _popen: subprocess.Popen[bytes] | None = None
    _log_begins: int = 0

    def start(self) -> None:
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                [*_as_nice_as_others(), *self.command],
                env={**self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.starts += 1
        self.stopped = self.killed = False

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def exit_code(self) -> int | None:
        return None if self._popen is None else self._popen.poll()

    @property
    def runs(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def log_of_this_start(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_begins)
            return file.read().decode(errors="replace")

    def address(self) -> str:
        """Empty before it serves."""
        if not self.runs:
            return ""
        found = re.search(self.ready, self.log_of_this_start, re.MULTILINE)
        return found[1] if found else ""

    @property
    def serves(self) -> bool:
        return self.runs and not self.stopped and bool(self.address())

    def signal(self, number: signal.Signals) -> None:
        if self.runs:
            os.kill(self.pid, number)
            self.stopped = number is signal.SIGSTOP
            self.killed = number is signal.SIGKILL

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


class Processes(Protocol):
    """Of one cluster. `mark`: in the environment of each. `ends`: what ended, and why."""

    processes: dict[str, Process]
    mark: str

    @property
    def ends(self) -> list[Ended]: ...

    def of_role(self, *roles: str) -> list[Process]: ...

    def watch(self) -> None: ...

    async def close(self) -> list[str]: ...


def kept_environment(mark: str) -> dict[str, str]:
    """Without settings of this terminal, but with the token of `bench.access`."""
    token = "KVRELAY_TOKEN_FILE"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "KVRELAY_"))}
    return kept | {MARK: mark, token: os.environ[token], "OMP_NUM_THREADS": "1"}


class Supervisor:
    """Starts each process, and starts it again `RESTART_AFTER_S` after it ended."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.mark = uuid.uuid4().hex
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def environment(self) -> dict[str, str]:
        return kept_environment(self.mark)

    def add(self, process: Process) -> None:
        self.processes[process.name] = process
        process.start()

    def of_role(self, *roles: str) -> list[Process]:
        return [one for one in self.processes.values() if one.role in roles]

    @property
    def ends(self) -> list[Ended]:
        return [end for process in self.processes.values() for end in process.ends]

    async def until_served(self, patience_s: float = 120.0) -> None:
        """Raises TimeoutError."""
        deadline_s = time.monotonic() + patience_s
        while late := [one for one in self.processes.values() if not one.address()]:
            if time.monotonic() > deadline_s:
                names = ", ".join(f"{one.name} ({one.log})" for one in late)
                raise TimeoutError(f"not served within {patience_s:g} s: {names}")
            await asyncio.sleep(LOOK_EVERY_S)

    def watch(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        restarts: dict[str, float] = {}
        while not self._closing:
            now_s = time.monotonic()
            for process in self.processes.values():
                self._look_at(process, restarts, now_s)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look_at(self, process: Process, restarts: dict[str, float], now_s: float) -> None:
        if process.runs:
            return
        if process.name not in restarts:
            process.ends.append(self._ended(process, now_s))
            restarts[process.name] = now_s + RESTART_AFTER_S
        elif now_s >= restarts[process.name]:
            del restarts[process.name]
            process.start()

    def _ended(self, process: Process, now_s: float) -> Ended:
        code = process.exit_code()
        asked = process.killed or self._closing
        return Ended(name=process.name, at_s=now_s, code=code or 0, asked=asked)

    async def close(self, patience_s: float = 60.0) -> list[str]:
        """Ends everything, routers first. Returns those that did not end with 0 by themselves."""
        self._closing = True
        if self._task is not None:
            await self._task
        bad: list[str] = []
        for roles in (("router",), ("prefill", "decode"), ("pool",)):
            bad += await self._end(self.of_role(*roles), patience_s)
        return bad

    async def _end(self, processes: Sequence[Process], patience_s: float) -> list[str]:
        for process in processes:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and any(one.runs for one in processes):
            await asyncio.sleep(LOOK_EVERY_S)
        hung = [one for one in processes if one.runs]
        for process in hung:
            process.signal(signal.SIGKILL)
            assert process._popen is not None
            process._popen.wait()
        told = [f"{one.name} did not end within {patience_s:g} s" for one in hung]
        codes = [(one.name, one.exit_code()) for one in processes if one not in hung]
        return told + [f"{name} ended with {code}" for name, code in codes if code]


BEFORE_OTHERS = -5


def go_before_others() -> None:
    """The clients' process: so that its own pauses are not taken for those of the cluster."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, BEFORE_OTHERS)


def _as_nice_as_others() -> list[str]:
    ahead = -os.getpriority(os.PRIO_PROCESS, 0)
    return ["nice", f"-n{ahead}"] if ahead > 0 else []


def marked_processes(mark: str) -> list[psutil.Process]:
    """All that were started with this mark, theirs too."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def kvrelay_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster", *arguments]
