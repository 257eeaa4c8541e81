"""What a handoff adds to a request, in each mode: two real workers, one long prompt at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from bench.http_load import Sent, closed_loop
from bench.models import SMOLLM_135M, write_random_llama
from bench.plain_cluster import PlainCluster, WorkerPlan, plain_cluster, pool_node
from bench.report import Reading, Row

MODES = {"shm": ("push", "pull", "pool")}
"""`pool` moves KV by way of the host's pool node, over shared memory whatever the link."""
OTHER_MODES = ("push", "pull")
POOL = "bench-handoff"
PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 8
PLANS = (WorkerPlan(role="prefill", cores=(0,)), WorkerPlan(role="decode", cores=(1,)))
SETTINGS = (
    "engine.block_size=16",
    "model.max_model_len=2304",
    "scheduler.prefill_chunk_tokens=512",
    "scheduler.max_running_requests=8",
)


def handoff_rows(transports: Sequence[str], repeats: int) -> list[Row]:
    """Of each transport, the modes side by side."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), SMOLLM_135M)
        return [row for one in transports for row in _rows(folder, one, repeats)]


def _rows(folder: Path, transport: str, repeats: int) -> list[Row]:
    modes = MODES.get(transport, OTHER_MODES)
    sent: dict[str, list[Sent]] = {mode: [] for mode in modes}
    with ExitStack() as stack:
        if "pool" in modes:
            stack.enter_context(pool_node(POOL))
        clusters = {mode: stack.enter_context(_cluster(folder, transport, mode)) for mode in modes}
        for number in range(repeats + 1):
            for mode, cluster in clusters.items():
                sent[mode] += closed_loop(cluster.http_port, [_prompt(number)], OUTPUT_TOKENS)
    return [_row(transport, mode, sent[mode][1:]) for mode in modes]


def _cluster(folder: Path, transport: str, mode: str) -> AbstractContextManager[PlainCluster]:
    link = (f"transfer.transports=[{transport}]", f"transfer.handoff={mode}")
    pool = POOL if mode == "pool" else None
    return plain_cluster(folder, PLANS, (*SETTINGS, *link), pool=pool)


def _prompt(number: int) -> list[int]:
    """Another one each time: no prefix is found again."""
    generator = torch.Generator().manual_seed(number)
    shape = (PROMPT_TOKENS,)
    return torch.randint(2, SMOLLM_135M.vocab_size, shape, generator=generator).tolist()


def _row(transport: str, mode: str, sent: Sequence[Sent]) -> Row:
    exposed_ms = Reading(
        values=tuple(one.ledger_ms["handoff"] + one.ledger_ms["decode_queue"] for one in sent)
    )
    gap_ms = Reading(values=tuple(1000 * one.gaps_s[0] for one in sent))
    return Row(
        name=f"{transport}: handoff {mode}, from the first token until decoding starts",
        value=exposed_ms.median,
        unit="ms",
        method=f"random Llama of SmolLM-135M's shape, bf16, {PROMPT_TOKENS} tokens in, one core "
        f"each, one request at a time; gap from token 1 to 2 {gap_ms.median:.1f} ms",
        spread=exposed_ms.spread(),
    )
