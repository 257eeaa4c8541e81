"""Processes of vLLM in its own environment (`make bench-peers`).

They are stopped (SIGSTOP) while others are measured: idle, they spin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench.models import SMOLLM_135M, write_random_llama
from bench.peers import PEERS

PYTHON = PEERS / "vllm" / "bin" / "python"
IN_PEER = Path(__file__).with_name("in_peer")
"""Holds the `sitecustomize` that each of its processes runs first."""
CACHE = PEERS / "vllm-cache"
"""Of what it compiles, a minute and a half the first time, for a model at one path."""
PATIENCE_S = 15.0


class Peer:
    """Once halted it runs only in `at_work`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def halt(self) -> None:
        self._signal(signal.SIGSTOP)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.halt()

    def _signal(self, number: signal.Signals) -> None:
        root = psutil.Process(self.process.pid)
        for one in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {self.process.returncode}: see what it wrote")


@contextmanager
def peer(arguments: Sequence[str], cores: Sequence[int], **environment: str) -> Iterator[Peer]:
    """`python ARGUMENTS` there, on these cores, with a thread on each; its log goes to stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else its processes would stay, halted
    if not PYTHON.exists():
        raise SystemExit(f"no {PYTHON}: run make bench-peers")
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), str(PYTHON), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_environment(cores) | environment,
    )
    started = Peer(process)
    try:
        yield started
    finally:
        _end(started)


def peer_model() -> Path:
    """A random Llama of SmolLM-135M's shape, always the same."""
    folder = CACHE.resolve() / "smollm-135m"
    return folder if folder.exists() else write_random_llama(folder, SMOLLM_135M)


def _environment(cores: Sequence[int]) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{PYTHON.parent.resolve()}:{os.environ['PATH']}",  # its compiler's helpers
        "PYTHONPATH": str(IN_PEER.resolve()),
        "UCX_USE_MT_MUTEX": "y",  # else NIXL's thread spins for UCX's lock
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(CACHE.resolve()),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _end(peer: Peer) -> None:
    """By itself, or in the end its session, so that no engine process stays."""
    with suppress(ProcessLookupError):
        os.killpg(peer.process.pid, signal.SIGCONT)
        peer.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        peer.process.wait(PATIENCE_S)
    with suppress(ProcessLookupError):
        os.killpg(peer.process.pid, signal.SIGKILL)
    peer.process.wait()
    for pipe in (peer.process.stdin, peer.process.stdout):
        if pipe is not None:
            pipe.close()
