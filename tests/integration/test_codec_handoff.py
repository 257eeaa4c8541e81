"""KV that is changed on its way: encoded in slabs, or converted between workers of two dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvpool.core.blocks.runs import path
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.block_names import ChainNames
from kvpool.core.layout.codec import CODEC_BLOCK_TOKENS
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.link_cost import LinkCost
from kvrelay.types import Role
from tests.integration.local_kit import READ_DIRECTLY, USE_SLABS, LocalHost, unmeasured
from tests.integration.split_kit import Cluster, running_cluster, wait_until, worker_settings
from tests.integration.test_handoff_exact import ask, check, prompts
from tests.integration.test_pieces_exact import formula, moved_bytes
from tests.models import random_checkpoint
from tests.reference import Reference, generate_reference

TOKENS = 24
LENGTHS = [33, 200]
ASKED = prompts(LENGTHS)
SLOW, FAST = (
    replace(USE_SLABS, bytes_per_s=1e6),
    replace(USE_SLABS, gather_bytes_per_s=1e12, scatter_bytes_per_s=1e12, bytes_per_s=1e12),
)

Settings = dict[str, object]
Hosts = tuple[LocalHost, LocalHost]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("codec") / "llama", "llama")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with unmeasured(), LocalHost() as first, LocalHost() as second:
        yield first, second


@contextmanager
def serving(
    hosts: Hosts, model: Path, cost: LinkCost | None, prefill: Settings, decode: Settings
) -> Iterator[Cluster]:
    """The link costs this, whatever is measured; None: what is measured, if anything is."""
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, model, **prefill)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, model, **decode)),
    ]
    with running_cluster(model, workers) as cluster:  # type: ignore[arg-type]
        if cost is not None:
            hosts[1].knows(hosts[0], cost)
        yield cluster


def answers(cluster: Cluster, hosts: Hosts) -> list[list[int]]:
    found = [ask(cluster, prompt, tokens=TOKENS) for prompt in ASKED]
    wait_until(lambda: hosts[0].loop.core.idle and hosts[1].loop.core.idle, "the requests are over")
    return found


def kept(host: LocalHost, prompt: list[int]) -> list[torch.Tensor]:
    """The KV of the prompt's whole blocks, as it was left in the worker's pool: of each plane,
    `[layers, tokens, heads, dim]`."""
    tables, memory = host.loop.core.decode.batch.tables, host.memory
    size = tables.layout.block_size
    run, length = tables.device.find(names(tables, prompt), None)
    assert length == len(prompt) // size
    blocks = [block for part in [*path(run)][::-1] for block in part.columns[0]][:length]
    slots = [block * size + i for block in blocks for i in range(size)]
    return [plane[:, slots] for plane in memory.planes[0]]


def names(tables: BlockTables, prompt: list[int]) -> ChainNames:
    chain = tables.chain("", len(prompt))
    chain.extend(prompt, len(prompt))
    return chain.full(len(prompt))


def encoded_bytes(layout: KvLayout, tokens: int) -> int:
    """A byte for each value, and a scale for each 16 tokens of a head."""
    blocks = -(-tokens // CODEC_BLOCK_TOKENS)
    return sum(
        len(group.layers) * (tokens * plane.elements + 4 * blocks * plane.heads)
        for group in layout.groups
        for plane in group.planes
    )


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    return [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in ASKED]


def share_of_equal(found: list[list[int]], references: list[Reference]) -> float:
    """Of all tokens, at their places."""
    expected = [token for reference in references for token in reference.tokens]
    both = zip([token for ids in found for token in ids], expected, strict=True)
    return sum(one == other for one, other in both) / len(expected)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_encoded_slabs(codec: str, hosts: Hosts, model: Path, references: list[Reference]) -> None:
    common = {"codec": codec, "canary_every": 1}  # nor is what was meant to change taken for wrong
    with serving(hosts, model, USE_SLABS, common, common) as cluster:
        found = answers(cluster, hosts)
        layout = hosts[1].loop.core.decode.batch.tables.layout
        sent = sum(encoded_bytes(layout, length) for length in LENGTHS)
        assert moved_bytes(hosts) == (sent, sent)
        assert sent < 0.35 * sum(formula(layout, length) for length in LENGTHS)
        bound = 1 / 254 if codec == "int8" else 1 / 16
        for ours, theirs in zip(*(kept(host, ASKED[1]) for host in hosts), strict=True):
            assert not torch.equal(ours, theirs)
            assert (ours - theirs).abs().max() <= bound * 1.01 * theirs.abs().max()
    if codec == "int8":
        assert share_of_equal(found, references) >= 0.75


def test_pieces_that_are_read_directly_are_not_encoded(
    hosts: Hosts, model: Path, references: list[Reference]
) -> None:
    common = {"codec": "int8"}
    with serving(hosts, model, READ_DIRECTLY, common, common) as cluster:
        check(answers(cluster, hosts), references)
        layout = hosts[1].loop.core.decode.batch.tables.layout
        assert moved_bytes(hosts) == (0, sum(formula(layout, length) for length in LENGTHS))


@pytest.mark.parametrize(
    ("here", "there", "cost", "encoded"),
    [
        ("auto", "auto", SLOW, True),
        ("auto", "auto", FAST, False),
        ("auto", "int8", SLOW, True),
        ("auto", "int8", FAST, False),
        ("int8", "fp8", SLOW, False),
        ("none", "int8", SLOW, False),
        ("int8", "none", SLOW, False),
    ],
)
def test_a_codec_is_used_where_both_allow_it_and_auto_where_it_is_faster(
    here: str,
    there: str,
    cost: LinkCost,
    encoded: bool,
    hosts: Hosts,
    model: Path,
    references: list[Reference],
) -> None:
    with serving(hosts, model, cost, {"codec": here}, {"codec": there}) as cluster:
        found = answers(cluster, hosts)
        layout = hosts[1].loop.core.decode.batch.tables.layout
        bytes_of = encoded_bytes if encoded else formula
        sent = sum(bytes_of(layout, length) for length in LENGTHS)
        assert moved_bytes(hosts) == (sent, sent)
    if not encoded:
        check(found, references)


@pytest.mark.parametrize(
    ("here", "there"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_two_dtypes_are_converted(
    here: str, there: str, hosts: Hosts, model: Path, references: list[Reference]
) -> None:
    """And two block sizes."""
    mixed = {"allow_mixed_precision": True, "canary_every": 1}
    prefill = {"dtype": here, "block_size": 16, **mixed}
    decode = {"dtype": there, "block_size": 24, **mixed}
    with serving(hosts, model, READ_DIRECTLY, prefill, decode) as cluster:
        found = answers(cluster, hosts)
        layouts = [host.loop.core.decode.batch.tables.layout for host in hosts]
        sent = min(sum(formula(layout, n) for n in LENGTHS) for layout in layouts)
        assert moved_bytes(hosts) == (sent, sent)
        for theirs, ours in zip(*(kept(host, ASKED[1]) for host in hosts), strict=True):
            whole = min(theirs.shape[1], ours.shape[1])
            assert torch.equal(ours[:, :whole], theirs[:, :whole].to(ours.dtype))
    assert share_of_equal(found, references) >= 0.5


def test_the_peers_slabs_may_be_larger_than_the_writers_own(hosts: Hosts, model: Path) -> None:
    """A cached prompt of several chunks leaves in pieces as large as the slabs that it goes to."""
    mixed = {"allow_mixed_precision": True, "transports": ("nixl",)}
    prefill = {"dtype": "bfloat16", **mixed}
    decode = {"dtype": "float32", "prefix_caching": False, **mixed}
    with serving(hosts, model, None, prefill, decode) as cluster:
        for _ in range(2):
            answers(cluster, hosts)
        sizes = [host.loop.core.decode.reservations.slabs.slab_bytes for host in hosts]
        assert sizes[0] < sizes[1]
        layout = hosts[0].loop.core.decode.batch.tables.layout
        sent = 2 * sum(formula(layout, length) for length in LENGTHS)
        assert moved_bytes(hosts) == (sent, sent)


def test_a_worker_of_another_dtype_is_refused_when_it_joins(
    hosts: Hosts, model: Path, references: list[Reference], caplog: pytest.LogCaptureFixture
) -> None:
    """Before any request; both it and the router say which key to set."""
    with serving(hosts, model, USE_SLABS, {}, {}) as cluster, LocalHost() as third:
        other = worker_settings("decode-1", Role.DECODE, model, dtype="bfloat16")
        address = third.start(other)
        cluster.router.call(cluster.router.process.add_worker(address))
        reason = (
            "worker decode-1 has KV in bfloat16, prefill-0 in float32: give both the same dtype, "
            "or set transfer.allow_mixed_precision: true on both to have it converted"
        )
        wait_until(lambda: f"a router refuses this worker: {reason}" in caplog.text, "it is told")
        wait_until(lambda: f"worker at {address} refused: {reason}" in caplog.text, "it is logged")
        assert {w.name for w in cluster.router.workers()} == {
            "prefill-0",
            "decode-0",
        }
        check(answers(cluster, hosts), references)
        third.stop(address)


def test_lossy_kv_has_names_of_its_own(hosts: Hosts, model: Path) -> None:
    """So nobody who did not ask for loss finds it here or in the pool."""
    plain = {"codec": "none"}
    with serving(hosts, model, USE_SLABS, plain, {"codec": "int8"}) as cluster:
        answers(cluster, hosts)
        exact, lossy = (host.loop.core.decode.batch.tables for host in hosts)
        for one, other in ((exact, lossy), (lossy, exact)):
            assert one.device.find(names(one, ASKED[1]), None)[1]
            assert not one.device.find(names(other, ASKED[1]), None)[1]


def test_auto_is_decided_by_what_is_measured_and_says_so(
    model: Path, references: list[Reference], caplog: pytest.LogCaptureFixture
) -> None:
    """Into memory that both share a copy is faster than any codec."""
    caplog.set_level("INFO")
    auto = {"codec": "auto"}
    with (
        LocalHost() as first,
        LocalHost() as second,
        serving((first, second), model, None, auto, auto) as cluster,
    ):
        answers(cluster, (first, second))
        wait_until(lambda: "KV from prefill-0" in caplog.text, "the link is measured")
        found = answers(cluster, (first, second))
    check(found, references)
    pattern = r"KV from prefill-0: codec none: a MiB takes [\d.]+ ms with none, [\d.]+ ms with "
    assert re.search(pattern, caplog.text)
