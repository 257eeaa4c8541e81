"""A handoff as the workers' own traces show it: chunks computed, KV moved, another one decoding.

A long prompt at a time, while one request decodes all along; the first is to warm up.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from bench.models import write_random_llama
from bench.report import Reading, Row
from bench.serving.http_load import send
from bench.transfer.pair import Pair
from bench.transfer.timeline import chrome
from bench.transfer.timeline.overlap import Handoff, handoffs

OUTPUT_TOKENS = 4
SHORT_TOKENS = 16
EXPOSED_ALLOWED_MS = {"cuda": 3.0}
GROUPS_ALLOWED = 1.5
"""Layer groups left when the last chunk is computed: its last one, and some of the one before."""


def profile_rows(path: Path, pair: Pair, transports: Sequence[str], repeats: int) -> list[Row]:
    """Writes the trace of all of them to `path`."""
    events: list[chrome.Event] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name, "model"), pair.model)
        for transport in transports:
            found = _traced(pair, folder, transport, Path(name, transport), repeats)
            events += found
            rows += rows_of(pair, transport, handoffs(chrome.ranges(found), chunks=2)[1:])
    chrome.write(path, events)
    return rows


def _traced(
    pair: Pair, folder: Path, transport: str, traces: Path, repeats: int
) -> list[chrome.Event]:
    setting = f"observability.trace_dir={traces}"
    with pair.serving(folder, transport, setting) as cluster:
        asyncio.run(_ask(cluster.http_port, pair, repeats))
    return chrome.merged(traces)


async def _ask(port: int, pair: Pair, repeats: int) -> None:
    short = pair.prompt(0, SHORT_TOKENS)
    lasting = asyncio.ensure_future(send(port, short, pair.max_model_len - SHORT_TOKENS))
    await send(port, pair.prompt(1, SHORT_TOKENS), OUTPUT_TOKENS)  # prefilled after the lasting one
    for number in range(repeats + 1):
        await send(port, pair.prompt(2 + number), OUTPUT_TOKENS)
    lasting.cancel()
    with suppress(asyncio.CancelledError):
        await lasting


def rows_of(pair: Pair, transport: str, found: Sequence[Handoff]) -> list[Row]:
    steps = min(one.decode_steps for one in found)
    off_us = max((one.within_us for one in found if one.within_us is not None), default=None)
    told = "by the host's clock"
    if off_us is not None:
        told = f"by the device's events, within {off_us} us of the host's clock"
    method = (
        f"{pair.what}, {pair.prompt_tokens} tokens in, chunks of {pair.chunk_tokens}, while "
        f"another decodes ({steps} steps or more during each handoff); read off the workers' "
        f"traces, {told}"
    )

    def row(
        name: str,
        unit: str,
        of: Callable[[Handoff], float],
        against: str = "",
        limit: float | None = None,
    ) -> Row:
        reading = Reading(values=tuple(of(one) for one in found))
        return Row(
            name=f"{transport}: {name}",
            value=reading.median,
            unit=unit,
            against=against,
            against_value=limit,
            goal=None if limit is None else 1.0,
            lower_is_better=True,
            method=method,
            spread=reading.spread(),
        )

    allowed_ms = EXPOSED_ALLOWED_MS.get(pair.device)
    return [
        row("KV is on its way", "ms", lambda one: 1e3 * one.transfer_s),
        row("of that behind the prompt's compute", "%", lambda one: 100 * one.hidden_share),
        row("of that after the last chunk's compute", "ms", lambda one: 1e3 * one.exposed_s),
        row(
            "from the last chunk's compute until committed",
            "ms",
            lambda one: 1e3 * one.commit_s,
            "" if allowed_ms is None else "allowed",
            allowed_ms,
        ),
        row(
            f"layer groups left then, of {found[0].groups}",
            "groups",
            lambda one: one.left_groups,
            "about one",
            GROUPS_ALLOWED,
        ),
    ]
