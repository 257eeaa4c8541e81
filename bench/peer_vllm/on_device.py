"""vLLM beside our engine on one device, where it is installed beside kvrelay: a batch, a long
prompt, a single stream, each in turn. Where it is not, a line says so, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from transformers import LlamaConfig

from bench.engine.cuda.random_engine import TINY
from bench.engine.speed import EngineRun, Load, load_bench_engine
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, print_table
from engine.runner import Engine

_FRACTION = 0.4
"""Of the device's memory that each may use: both hold the model at the same time."""
_SCRIPT = Path(__file__).with_name("offline.py")


class Offline:
    """`offline.py` in a process; it has loaded the model."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._line()

    def generate(self, load: Load) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        asked = {"prompts": load.prompts().tolist(), "tokens": load.output_tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return float(json.loads(self._line())["seconds"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("vLLM ended: what it wrote to stderr says why")
        return line


@contextmanager
def _offline(folder: Path, load: Load) -> Iterator[Offline]:
    length = load.prompt_tokens + load.output_tokens
    arguments = [str(folder), str(length), str(load.requests), str(_FRACTION)]
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Offline(process)
    finally:
        process.kill()
        process.communicate()


def _ours(engine: Engine, load: Load) -> float:
    run = EngineRun(engine, load)
    begun_s = time.perf_counter()
    run.generate()
    return time.perf_counter() - begun_s


def rows(device: str, batch: Load, config: LlamaConfig) -> list[Row]:
    loads = {
        f"{batch.requests} x ({batch.prompt_tokens} in, {batch.output_tokens} out)": batch,
        f"a prompt of {batch.prompt_tokens}": replace(batch, requests=1, output_tokens=1),
        "a single stream": replace(batch, requests=1),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), config)
        engine = load_bench_engine(folder, batch, device)
        with _offline(folder, batch) as vllm:
            runs = (partial(_ours, engine), vllm.generate)
            for run in runs:
                run(batch)
            found = {what: [run(load) for run in runs] for what, load in loads.items()}
    return [
        Row(
            name=what,
            value=ours,
            unit="s",
            against="vllm",
            against_value=its,
            lower_is_better=True,
            method=f"random Llama, {config.num_hidden_layers} layers of {config.hidden_size}, "
            f"bf16, {device}, in turn, once each",
        )
        for what, (ours, its) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="two short prompts")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        print("skipped: vLLM is not installed beside kvrelay (pip install vllm)")
        return
    batch = Load(requests=16, prompt_tokens=512, output_tokens=64, chunk_tokens=512)
    config = SMOLLM_135M
    if args.rehearse:
        batch = Load(requests=2, prompt_tokens=32, output_tokens=3, chunk_tokens=32)
        config = LlamaConfig(**{**TINY.to_dict(), "vocab_size": SMOLLM_135M.vocab_size})
    print_table("Against vLLM", rows(args.device, batch, config))


if __name__ == "__main__":
    main()
