"""Which bytes of a prompt's KV travel, and how: real workers over shared memory, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvpool.core.layout.layout import KvLayout
from kvrelay.types import Role
from tests.integration.local_kit import READ_DIRECTLY, USE_SLABS, LocalHost, unmeasured
from tests.integration.split_kit import Cluster, running_cluster, wait_until, worker_settings
from tests.integration.test_handoff_exact import ask, check, prompts
from tests.models import random_checkpoint
from tests.reference import generate_reference

TOKENS = 24
WINDOWS = {"gemma2": 40, "mistral": 48}


@pytest.fixture
def here() -> Iterator[tuple[LocalHost, LocalHost]]:
    with unmeasured(), LocalHost() as first, LocalHost() as second:
        yield first, second


def formula(layout: KvLayout, tokens: int) -> int:
    """Bytes of the KV that the first token after the prompt sees, and those behind it."""
    total = 0
    for group in layout.groups:
        seen = tokens if group.window is None else min(tokens, group.window - 1)
        total += group.elements_per_token * layout.element_bytes * seen
    return total


def moved_bytes(hosts: tuple[LocalHost, LocalHost]) -> tuple[int, int]:
    """(through slabs, into the decode worker's blocks) so far."""
    sender = hosts[0].loop.core.prefill.handoffs
    receiver = hosts[1].loop.core.decode.reservations
    return sender.transfer_bytes, receiver.transfer_bytes


@pytest.mark.parametrize("handoff", ["push", "pull"])
@pytest.mark.parametrize("way", ["slabs", "direct"])
@pytest.mark.parametrize("family", WINDOWS)
def test_what_the_windows_show_travels_and_no_more(
    family: str, way: str, handoff: str, here: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """Up to four windows of context, between pools of different block sizes."""
    model = random_checkpoint(tmp_path / family, family)
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    window = WINDOWS[family]
    asked = prompts([1, window // 2, window, 2 * window, 4 * window])
    common = {"prefix_caching": False, "handoff": handoff}
    workers = [
        (here[0], worker_settings("prefill-0", Role.PREFILL, model, block_size=16, **common)),
        (here[1], worker_settings("decode-0", Role.DECODE, model, block_size=24, **common)),
    ]
    with running_cluster(model, workers) as cluster:  # type: ignore[arg-type]
        here[1].knows(here[0], READ_DIRECTLY if way == "direct" else USE_SLABS)
        found = [counted(cluster, here, prompt, way) for prompt in asked]
    check(found, [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked])


def counted(
    cluster: Cluster, hosts: tuple[LocalHost, LocalHost], prompt: list[int], way: str
) -> list[int]:
    before = moved_bytes(hosts)
    ids = ask(cluster, prompt, tokens=TOKENS)
    wait_until(lambda: hosts[0].loop.core.idle and hosts[1].loop.core.idle, "the request is over")
    slabs, landed = (now - old for now, old in zip(moved_bytes(hosts), before, strict=True))
    expected = formula(hosts[1].loop.core.decode.batch.tables.layout, len(prompt))
    assert landed == expected
    assert slabs == (0 if way == "direct" else expected)
    return ids
