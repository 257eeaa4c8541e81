"""The memory that each rank takes to load its share of a model, and the seconds.

A random Llama of 2 GB in bf16, on CPUs, at degrees 1, 2 and 4. Each start is a process of its own.
Its peak is VmHWM of /proc/PID/status: all resident pages, also those that processes share, which
are code, the ranks' shared memory, and the checkpoint's pages while they are mapped. Beside it
stands what each rank needed before: the whole model by `from_pretrained`, used once.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.models import write_random_llama
from bench.report import Row, print_table, write_json
from engine.core.sizing import EngineLimits
from engine.device.threads import use_threads
from engine.load import load_engine
from engine.load_ranks import load_split
from engine.model.checkpoint import open_checkpoint
from engine.parallel.grid import Grid
from engine.runner import Engine

_DEGREES = (1, 2, 4)
_PLAIN, _COMPILED = "plain", "compiled"
_ALLOWANCE_BYTES = 2e9
_GB = 1e9
_METHOD = (
    "VmHWM of each process when the engine is ready: code, shared memory and mapped pages of the "
    "checkpoint count in each; 64 blocks of KV"
)
MODEL = LlamaConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=20,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """`share_bytes`: the weights of one rank. `peaks_bytes`: those of all ranks."""

    seconds: float
    share_bytes: int
    peaks_bytes: list[int]


def peak_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def load(folder: Path, degree: int, *, compiled: bool) -> Start:
    """In a process that does nothing else."""
    use_threads(1)
    started_s = time.monotonic()
    engine = _engine(folder, degree, compiled=compiled)
    ranks = [psutil.Process(), *psutil.Process().children()]
    found = Start(
        seconds=time.monotonic() - started_s,
        share_bytes=engine.model.weight_bytes,
        peaks_bytes=[peak_bytes(one) for one in ranks[:degree]],
    )
    engine.close()
    return found


def _engine(folder: Path, degree: int, *, compiled: bool) -> Engine:
    limits = EngineLimits(max_model_len=1024, prefill_chunk_tokens=512, max_running_requests=16)
    common: Any = {"device": "cpu", "dtype": "auto", "block_size": 16, "blocks": 64}
    common |= {"limits": limits, "compiled": compiled}
    checkpoint = open_checkpoint(str(folder))
    if degree == 1:
        return load_engine(checkpoint, **common)
    return load_split(checkpoint, Grid(tensor=degree), threads=1, **common)


def load_whole(folder: Path) -> Start:
    """Without anything of ours."""
    use_threads(1)
    started_s = time.monotonic()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        module(torch.zeros(1, 24, dtype=torch.long))
    return Start(
        seconds=time.monotonic() - started_s,
        share_bytes=sum(one.nbytes for one in module.parameters()),
        peaks_bytes=[peak_bytes(psutil.Process())],
    )


def in_a_process(folder: Path, kind: str) -> Start:
    command = [sys.executable, "-m", "bench.engine.loading", "--kind", kind, "--folder", folder]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path) -> list[Row]:
    rows = _rows("whole model, from_pretrained", in_a_process(folder, "whole"))
    for degree in _DEGREES:
        for mode in (_PLAIN, _COMPILED):
            found = in_a_process(folder, f"{degree} {mode}")
            rows += _rows(f"degree {degree}, {mode}", found)
    return rows


def _rows(name: str, found: Start) -> list[Row]:
    peaks = ", ".join(f"{peak / _GB:.2f}" for peak in found.peaks_bytes)
    peak = Row(
        name=f"{name}: largest peak of a rank",
        value=max(found.peaks_bytes) / _GB,
        unit="GB",
        against=f"{found.share_bytes / _GB:.2f} GB of weights, and 2 GB",
        against_value=(found.share_bytes + _ALLOWANCE_BYTES) / _GB,
        goal=1.0,
        lower_is_better=True,
        method=_METHOD,
        spread=f"ranks: {peaks}",
    )
    return [peak, Row(name=f"{name}: until it is ready", value=found.seconds, unit="s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--folder", type=Path, help="with --kind: the checkpoint")
    parser.add_argument("--kind", help="measure this start here: whole, or DEGREE plain|compiled")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.kind is not None:
        print(json.dumps(asdict(_start(args.folder, args.kind))))
        return
    with tempfile.TemporaryDirectory() as name:
        rows = measure(write_random_llama(Path(name), MODEL))
    print_table("Loading", rows)
    if args.json:
        write_json(args.json, rows)


def _start(folder: Path, kind: str) -> Start:
    if kind == "whole":
        return load_whole(folder)
    degree, mode = kind.split()
    return load(folder, int(degree), compiled=mode == _COMPILED)


if __name__ == "__main__":
    main()
