"""How long `kvrelay serve` takes to start, and a worker's imports, its longest phase."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from bench.report import Reading, Row, print_table
from bench.serving.plain_cluster import is_ready

START_GOAL_S = 20.0
REPEATS = 5


def start_up(repeats: int) -> list[Row]:
    """`kvrelay serve` without arguments, from the command to 200 on /ready."""
    values = [_start_once() for _ in range(repeats)]
    reading = Reading(values=tuple(values))
    return [
        Row(
            name="kvrelay serve, command to /ready",
            value=reading.median,
            unit="s",
            against="aim",
            against_value=START_GOAL_S,
            goal=1.0,
            lower_is_better=True,
            method="bundled model, Ray started too, 2 cores",
            spread=reading.spread(),
        )
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_once() -> float:
    port = free_port()
    command = [sys.executable, "-m", "cluster", "serve", f"--http-port={port}", "--grpc-port=0"]
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--name", f"bench-{os.getpid()}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not is_ready(port):
            if process.poll() is not None:
                raise RuntimeError("kvrelay serve stopped by itself")
            time.sleep(0.05)
        return time.perf_counter() - started_s
    finally:
        process.terminate()
        process.wait(timeout=120)


_IMPORTS = """
import contextlib, sys, time
from kvrelay.gc_pauses import freeze, paused
with paused() if sys.argv[1] == "paused" else contextlib.nullcontext():
    import cluster.worker.last_words, cluster.worker.process
freeze()
print(time.process_time())
"""


def imports(repeats: int) -> Row:
    """CPU time of a worker's imports, until it is frozen: without collections by with them."""
    values = [_import_s("paused") / _import_s("collecting") for _ in range(repeats)]
    reading = Reading(values=tuple(values))
    return Row(
        name="imports of a worker, without collections by with them",
        value=reading.median,
        unit="x",
        method="CPU seconds of a process each, in turn",
        spread=reading.spread(),
        lower_is_better=True,
    )


def _import_s(how: str) -> float:
    command = [sys.executable, "-c", _IMPORTS, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


if __name__ == "__main__":
    print_table("imports of a worker", [imports(REPEATS)])
