"""How long `kvrelay serve` takes to start, and of it a worker's imports and its engine."""

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


_LOADED = """
import resource, sys, time
import cluster.worker.process
from engine.bundled import checkpoint_path
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint

limits = EngineLimits(max_model_len=None, prefill_chunk_tokens=256, max_running_requests=8)
settings = {"device": "cpu", "dtype": "auto", "block_size": 16, "blocks": 64}
found = open_checkpoint(str(checkpoint_path()))
engine = load_engine(found, limits=limits, reuses_starts=sys.argv[1] == "kept", **settings)
assert (engine.model.recording is not None) == (sys.argv[1] == "kept")
print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
_TORCH = "import time, torch; print(time.process_time(), 0)"


def loads(repeats: int) -> list[Row]:
    """CPU time and memory of a worker until its engine is loaded and checked, of a model that has
    been started before. In turn: by what that start kept, by transformers, and PyTorch's import
    alone, which none can do without."""
    _measure(_LOADED.replace("assert", "#"), "kept")
    rounds = [
        [_measure(_LOADED, "kept"), _measure(_LOADED, "transformers"), _measure(_TORCH, "")]
        for _ in range(repeats)
    ]
    seconds = [[one[0] for one in three] for three in rounds]
    return [
        _ratio("CPU time, by a kept start by transformers", [s[0] / s[1] for s in seconds]),
        _ratio("CPU time, by a kept start by import torch", [s[0] / s[2] for s in seconds]),
        _ratio("memory, by a kept start by transformers", [r[0][1] / r[1][1] for r in rounds]),
        Row(
            name="CPU time, by a kept start",
            value=Reading(values=tuple(s[0] for s in seconds)).median,
            unit="s",
            method="from exec to a loaded and checked engine, the bundled model",
            lower_is_better=True,
        ),
    ]


def _ratio(name: str, values: list[float]) -> Row:
    reading = Reading(values=tuple(values))
    return Row(
        name=name,
        value=reading.median,
        unit="x",
        method="processes of their own, in turn",
        spread=reading.spread(),
        lower_is_better=True,
    )


def _measure(program: str, how: str) -> list[float]:
    command = [sys.executable, "-c", program, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(one) for one in done.stdout.split()[-2:]]


if __name__ == "__main__":
    print_table("imports of a worker", [imports(REPEATS), *loads(REPEATS)])
