"""What a handoff adds to a request, in each mode: two real workers, one long prompt at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.models import write_random_llama
from bench.report import Reading, Row
from bench.serving.http_load import Sent, closed_loop
from bench.serving.plain_cluster import pool_node
from bench.transfer.pair import Pair

MODES = {"shm": ("push", "pull", "pool")}
"""`pool` moves KV by way of the host's pool node, over shared memory whatever the link."""
OTHER_MODES = ("push", "pull")
POOL = "bench-handoff"
OUTPUT_TOKENS = 8


def handoff_rows(pair: Pair, transports: Sequence[str], repeats: int) -> list[Row]:
    """Of each transport, the modes side by side."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), pair.model)
        return [row for one in transports for row in _rows(pair, folder, one, repeats)]


def _rows(pair: Pair, folder: Path, transport: str, repeats: int) -> list[Row]:
    modes = MODES.get(transport, OTHER_MODES)
    sent: dict[str, list[Sent]] = {mode: [] for mode in modes}
    with ExitStack() as stack:
        if "pool" in modes:
            stack.enter_context(pool_node(POOL))
        clusters = {
            mode: stack.enter_context(
                pair.serving(
                    folder,
                    transport,
                    f"transfer.handoff={mode}",
                    pool=POOL if mode == "pool" else None,
                )
            )
            for mode in modes
        }
        for number in range(repeats + 1):
            for mode, cluster in clusters.items():
                prompts = [pair.prompt(number)]
                sent[mode] += closed_loop(cluster.http_port, prompts, OUTPUT_TOKENS)
    return [_row(pair, transport, mode, sent[mode][1:]) for mode in modes]


def _row(pair: Pair, transport: str, mode: str, sent: Sequence[Sent]) -> Row:
    exposed_ms = Reading(
        values=tuple(one.ledger_ms["handoff"] + one.ledger_ms["decode_queue"] for one in sent)
    )
    gap_ms = Reading(values=tuple(1000 * one.gaps_s[0] for one in sent))
    return Row(
        name=f"{transport}: handoff {mode}, from the first token until decoding starts",
        value=exposed_ms.median,
        unit="ms",
        method=f"{pair.what}, {pair.prompt_tokens} tokens in, one request at a time; "
        f"gap from token 1 to 2 {gap_ms.median:.1f} ms",
        spread=exposed_ms.spread(),
    )
