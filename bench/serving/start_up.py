"""How long `kvrelay serve` takes to start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from bench.report import Reading, Row
from bench.serving.plain_cluster import is_ready

START_GOAL_S = 20.0


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
