"""What copying the block in which prompts part saves, against reusing whole blocks alone.

Prompts with one of several system prompts of any length, through the block tables: how many of
their tokens are left to compute. Then the step that computes the rest of one such prompt, on a
random Llama of SmolLM-135M's shape: with the copy made before it, and without.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, interleave, print_table, write_json
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.step import SampleRequest, SequenceSlice, StepBatch
from kvpool.holder import Holder
from kvpool.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.tables import BlockTables
from kvrelay.types import RequestKey, Sampling

BLOCK_SIZES = (16, 32, 64)
SYSTEMS, PROMPTS, OWN_TOKENS = 20, 1000, 24
STEP_BLOCK_SIZE = 16
VOCABULARY = 32_000


# --- tokens -------------------------------------------------------------------------------------


def _prompts() -> list[list[int]]:
    draw = random.Random(0)
    systems = [draw.choices(range(VOCABULARY), k=draw.randrange(100, 1000)) for _ in range(SYSTEMS)]
    return [
        [*draw.choice(systems), *draw.choices(range(VOCABULARY), k=OWN_TOKENS)]
        for _ in range(PROMPTS)
    ]


def tokens_row(block_size: int) -> Row:
    """One prompt after another; the cache has room for all."""
    group = LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=1),))
    layout = KvLayout(groups=(group,), dtype="float32", block_size=block_size)
    tables, whole, copied, asked = BlockTables(layout, 100_000), 0, 0, 0
    for number, prompt in enumerate(_prompts()):
        found, more = _serve(tables, Holder("bench", RequestKey(str(number), 0)), prompt)
        asked, whole, copied = asked + len(prompt), whole + found, copied + more
    return Row(
        name=f"tokens computed of a prompt, blocks of {block_size}",
        value=(asked - whole - copied) / PROMPTS,
        unit="tokens",
        against="whole blocks only",
        against_value=(asked - whole) / PROMPTS,
        lower_is_better=True,
        method=f"{PROMPTS} prompts of {asked / PROMPTS:.0f} tokens on average, the last "
        f"{OWN_TOKENS} their own, before them one of {SYSTEMS} system prompts",
    )


def _serve(tables: BlockTables, holder: Holder, prompt: list[int]) -> tuple[int, int]:
    """Tokens found in whole blocks, and copied."""
    names, last = tables.chain("", len(prompt)), len(prompt) - 1
    names.extend(prompt, len(prompt))
    found = tables.try_open(holder, len(prompt), hashes=names.full(last), now_s=0)
    assert found is not None
    copied, _ = tables.begin_like_another(holder, names, prompt, last)
    tables.fill(holder, names.full(len(prompt)), names=names)
    tables.fill_partly(holder, names, prompt[len(prompt) // names.block_size * names.block_size :])
    tables.release(holder)
    return found, copied


# --- seconds ------------------------------------------------------------------------------------


def _step_ms(engine: Engine, prompt: list[int], whole: int, copied: int) -> float:
    """The first step of a prompt of which `whole` tokens are cached and `copied` are copied."""
    blocks = range(engine.layout.blocks_for(len(prompt)))
    started_s = time.perf_counter()
    if copied:
        spare, own = BlockId(len(blocks)), BlockId(whole // STEP_BLOCK_SIZE)
        engine.copy_blocks((((spare, own),),))
    sample = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0), choice=0, index=0, prompt_ids=(), emitted_ids=()
    )
    piece = SequenceSlice(
        key=RequestKey("bench", 0),
        choice=0,
        token_ids=tuple(prompt[whole + copied :]),
        start=whole + copied,
        tables=(tuple(map(BlockId, blocks)),),
        samples=(sample,),
        prompt_tokens=len(prompt),
    )
    engine.run(StepBatch(slices=(piece,)))
    return 1000 * (time.perf_counter() - started_s)


def _engine(folder: Path) -> Engine:
    torch.set_num_threads(1)
    limits = EngineLimits(
        max_model_len=1024,
        prefill_chunk_tokens=512,
        max_running_requests=1,
        kv_memory_bytes=1 << 28,
    )
    return load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype="bfloat16",
        block_size=STEP_BLOCK_SIZE,
        blocks=128,
        limits=limits,
    )


def step_rows(engine: Engine, repeats: int) -> list[Row]:
    rows = []
    for whole, copied, own in ((992, 15, 1), (992, 8, 24), (992, 2, 24), (0, 8, 248), (0, 2, 254)):
        prompt = random.Random(0).choices(range(2, VOCABULARY), k=whole + copied + own)
        readings = interleave(
            {
                "copied": partial(_step_ms, engine, prompt, whole, copied),
                "computed": partial(_step_ms, engine, prompt, whole, 0),
            },
            repeats=repeats,
        )
        rows.append(
            Row(
                name=f"step: {whole} tokens cached, {copied} copied, {own} computed",
                value=readings["copied"].median,
                unit="ms",
                against=f"{copied + own} computed",
                against_value=readings["computed"].median,
                lower_is_better=True,
                method="CPU, one core, bf16",
                spread=readings["copied"].spread(),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [tokens_row(size) for size in BLOCK_SIZES]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_llama(Path(scratch), SMOLLM_135M)
        rows += step_rows(_engine(folder), arguments.repeats)
    print_table("Prompts that part within a block", rows)
    if arguments.json is not None:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
