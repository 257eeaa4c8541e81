"""The bare engine against transformers' own ways to generate, in one process.

A random Llama of SmolLM-135M's shape, 16 requests of 512 tokens in and 64 out, greedy.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.engine import step_overhead
from bench.engine.paging import paging
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Reading, Row, interleave, print_table, write_json
from engine.core.sizing import EngineLimits
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId, Tables
from kvrelay.types import RequestKey, Sampling

_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    requests: int
    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int

    @property
    def total_output_tokens(self) -> int:
        return self.requests * self.output_tokens

    def prompts(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (self.requests, self.prompt_tokens)
        return torch.randint(2, SMOLLM_135M.vocab_size, shape, generator=generator)


class EngineRun:
    """All requests through `Engine.run`: prompts in chunks, then one batch of decodes per step."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._engine, self._load = engine, load
        self._prompts = load.prompts().tolist()
        blocks = engine.layout.blocks_for(load.prompt_tokens + load.output_tokens)
        self._tables: list[Tables] = [
            (tuple(BlockId(i) for i in range(r * blocks, (r + 1) * blocks)),)
            for r in range(load.requests)
        ]

    def generate(self) -> list[list[int]]:
        texts: list[list[int]] = [list(prompt) for prompt in self._prompts]
        self._prefill(texts)
        for _ in range(self._load.output_tokens - 1):
            pieces = [self._piece(r, text, len(text) - 1, True) for r, text in enumerate(texts)]
            self._run(texts, pieces)
        return [text[self._load.prompt_tokens :] for text in texts]

    def _prefill(self, texts: list[list[int]]) -> None:
        for r in range(self._load.requests):
            for start in range(0, self._load.prompt_tokens, self._load.chunk_tokens):
                end = min(start + self._load.chunk_tokens, self._load.prompt_tokens)
                is_last = end == self._load.prompt_tokens
                self._run(texts, [self._piece(r, texts[r][:end], start, is_last)])

    def _run(self, texts: list[list[int]], pieces: Sequence[SequenceSlice]) -> None:
        outcome = self._engine.run(StepBatch(slices=tuple(pieces)))
        for piece, sampled in zip(pieces, outcome.sampled, strict=True):
            texts[int(piece.key.request_id)] += [one.token_id for one in sampled]

    def _piece(self, request: int, text: list[int], start: int, samples: bool) -> SequenceSlice:
        sampling = Sampling(max_tokens=self._load.output_tokens, seed=0)
        wanted = SampleRequest(sampling=sampling, choice=0, prompt_ids=(), emitted_ids=())
        return SequenceSlice(
            key=RequestKey(str(request), 0),
            choice=0,
            token_ids=tuple(text[start:]),
            start=start,
            tables=self._tables[request],
            samples=(wanted,) if samples else (),
        )


def _peers(folder: Path, load: Load, device: str) -> dict[str, Callable[[], object]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    prompts = load.prompts().to(device)
    settings = {
        "do_sample": False,
        "max_new_tokens": load.output_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    static = GenerationConfig(cache_implementation="static", **settings)
    batch = GenerationConfig(**settings)
    pages = paging(
        sequences=load.requests,
        tokens=load.prompt_tokens + load.output_tokens,
        step_tokens=load.chunk_tokens,
    )
    inputs = prompts.tolist()
    return {
        "static generate": lambda: model.generate(prompts, generation_config=static),
        "generate_batch": lambda: model.generate_batch(
            inputs, generation_config=batch, continuous_batching_config=pages
        ),
    }


def _rate(run: Callable[[], object], load: Load, device: str) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return load.total_output_tokens / (time.perf_counter() - begin)

    return measure


def _rows(readings: dict[str, Reading], method: str) -> list[Row]:
    own = readings["kvrelay"]
    goals = {"generate_batch": 1.5, "static generate": 1.0}
    return [
        Row(
            name="output tokens/s, 16 x (512 in, 64 out)",
            value=own.median,
            unit="tokens/s",
            against=f"transformers {peer}",
            against_value=readings[peer].median if peer in readings else None,
            goal=goal,
            method=method,
            spread=own.spread() + (f"; peer {readings[peer].spread()}" if peer in readings else ""),
        )
        for peer, goal in goals.items()
    ]


def measure(device: str, threads: int, repeats: int, peers: bool) -> list[Row]:
    torch.set_num_threads(threads)
    load = Load(requests=16, prompt_tokens=512, output_tokens=64, chunk_tokens=512)
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), SMOLLM_135M)
        engine = load_bench_engine(folder, load, device)
        runs: dict[str, Callable[[], object]] = {"kvrelay": EngineRun(engine, load).generate}
        if peers:
            runs |= _peers(folder, load, device)
        if device != "cpu":
            for run in runs.values():
                run()
        overhead = step_overhead.measure(engine)
        rates = {key: _rate(run, load, device) for key, run in runs.items()}
        readings = interleave(rates, repeats=repeats)
    where = f"{threads} threads" if device == "cpu" else device
    method = f"random Llama of SmolLM-135M's shape, untied, bf16, {where}"
    return [*_rows(readings, method), overhead]


def load_bench_engine(folder: Path, load: Load, device: str) -> Engine:
    limits = EngineLimits(
        max_model_len=load.prompt_tokens + load.output_tokens,
        prefill_chunk_tokens=load.chunk_tokens,
        max_running_requests=load.requests,
    )
    return load_engine(
        open_checkpoint(str(folder)),
        device=device,
        dtype="bfloat16",
        block_size=_BLOCK_SIZE,
        blocks=None,
        limits=limits,
    )


def _of_device(args: argparse.Namespace) -> list[Row]:
    from bench.engine.cuda.speed import SMALL, Sizes, measure_engine

    return measure_engine(
        args.device,
        args.attention,
        SMALL if args.rehearse else Sizes(),
        graphs=not args.no_graphs,
        fp8=args.quantization == "fp8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="auto", help="attention.backend, on CUDA")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none", help="on CUDA")
    parser.add_argument("--no-peers", action="store_true", help="measure kvrelay alone")
    parser.add_argument("--rehearse", action="store_true", help="the device's rows, tiny")
    parser.add_argument("--peer", choices=["transformers", "vllm"], default="transformers")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.peer == "vllm":
        from bench.peer_vllm.engines import versus_vllm

        rows = versus_vllm(args.threads, args.repeats)
    else:
        is_device = args.rehearse or args.device.startswith("cuda")
        rows = _of_device(args) if is_device else []
        if args.quantization == "none" and not args.rehearse:
            rows += measure(args.device, args.threads, args.repeats, not args.no_peers)
    print_table("Engine", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
