"""KV that arrives wrong, behind every checksum, is noticed; the answer is right all the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli.status.asked import of_router
from cluster.cli.status.tables import print_table
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Role
from router.core.state import quarantine
from router.core.state.generation import WorkerStatus
from tests.access import ACCESS
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import Reference, assert_same_tokens, generate_reference

TOKENS = 8


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def references(model: Path, asked: list[list[int]]) -> list[Reference]:
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    return [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked]


def ask(cluster: Cluster, prompt: list[int]) -> list[int]:
    answer = cluster.completion(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def worker(cluster: Cluster, name: str) -> WorkerStatus:
    (found,) = [w for w in cluster.router.workers() if w.name == name]
    return found


def checks(cluster: Cluster, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(cluster.metrics())
    samples = [s for family in families for s in family.samples if s.labels.get("worker") == name]
    return {s.labels["result"]: s.value for s in samples if s.name == "kvrelay:canary_checks_total"}


def assert_checks(cluster: Cluster, name: str, *, passed: int, mismatched: int) -> None:
    """A worker tells of them after the answer."""
    expected = {"passed": passed, "mismatched": mismatched}
    wait_until(lambda: checks(cluster, name) == expected, f"{name} has checked: {expected}", 10.0)


def quarantined(cluster: Cluster) -> list[tuple[str, str, str]]:
    pairs = cluster.router.read(cluster.router.process.dispatcher.quarantined)
    return [(pair.prefill, pair.decode, pair.reason) for pair in pairs]


def end_back_offs(cluster: Cluster) -> None:
    """As if their time had passed."""
    records = cluster.router.process.dispatcher.core.state.quarantine._records

    def end() -> None:
        for pair, record in records.items():
            records[pair] = replace(record, until_s=record.failed_s)

    cluster.router.read(end)


def settings(model: Path, name: str, role: Role, **changes: object):  # type: ignore[no-untyped-def]
    return worker_settings(name, role, model, canary_every=1, **changes)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_wrong_block_costs_one_more_try(
    family: str, hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    """The only pair there is: it is asked again at once, and a right handoff clears it."""
    model = random_checkpoint(tmp_path / family, family)
    (reference,) = references(model, asked := prompts(100))
    one = (hosts[0], settings(model, "prefill-0", Role.PREFILL))
    with running_cluster(model, [one]) as cluster:
        address = cluster.add(hosts[1], settings(model, "decode-0", Role.DECODE))
        hosts[1].damage(address, pieces=1)
        assert_same_tokens(reference, ask(cluster, asked[0]))
        assert_checks(cluster, "decode-0", passed=1, mismatched=1)
        assert not quarantined(cluster)
        cluster.assert_clean()
        hosts[1].stop(address)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float32", {"codec": "int8"}), ("bfloat16", {"allow_mixed_precision": True})],
)
def test_a_wrong_block_is_noticed_among_what_was_lost_on_purpose(
    dtype: str,
    changes: dict[str, object],
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
) -> None:
    model = random_checkpoint(tmp_path / "llama", "llama")
    one = (hosts[0], settings(model, "prefill-0", Role.PREFILL, **changes))
    with running_cluster(model, [one]) as cluster:
        last = settings(model, "decode-0", Role.DECODE, dtype=dtype, **changes)
        address = cluster.add(hosts[1], last)
        (asked,) = prompts(100)
        hosts[1].damage(address, pieces=1)
        assert len(ask(cluster, asked)) == TOKENS
        assert_checks(cluster, "decode-0", passed=1, mismatched=1)
        cluster.assert_clean()
        hosts[1].stop(address)


def test_a_pair_is_left_alone_for_a_while_and_used_again(
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "FIRST_BACK_OFF_S", 100.0)
    model = random_checkpoint(tmp_path / "llama", "llama")
    asked = prompts(100, 90, 80)
    expected = references(model, asked)
    one = (hosts[0], settings(model, "prefill-0", Role.PREFILL))
    with running_cluster(model, [one]) as cluster:
        bad = cluster.add(hosts[1], settings(model, "decode-0", Role.DECODE))
        good = cluster.add(hosts[1], settings(model, "decode-1", Role.DECODE))
        core = cluster.router.process.dispatcher.core
        hosts[1].damage(bad, pieces=100)
        assert_same_tokens(expected[0], ask(cluster, asked[0]))
        assert quarantined(cluster) == [("prefill-0", "decode-0", "kv_mismatch")]
        print_table(of_router(cluster.internal_grpc, ACCESS))
        assert worker(cluster, "decode-0").counters.cached_blocks == 0
        assert_same_tokens(expected[1], ask(cluster, asked[1]))
        assert_checks(cluster, "decode-0", passed=0, mismatched=1)
        assert_checks(cluster, "decode-1", passed=2, mismatched=0)
        hosts[1].damage(bad, pieces=0)
        end_back_offs(cluster)
        assert not quarantined(cluster)
        (other,) = [v for v in core.state.workers.values() if v.hello.name == "decode-1"]
        other.draining = True
        assert_same_tokens(expected[2], ask(cluster, asked[2]))
        assert_checks(cluster, "decode-0", passed=1, mismatched=1)
        assert not core.state.quarantine.active(0.0), "the next failure begins anew"
        cluster.assert_clean()
        for address in (bad, good):
            hosts[1].stop(address)
    told = capsys.readouterr().out
    assert "prefill-0 -> decode-0 is quarantined for" in told
    assert "failed once, lately by kv_mismatch" in told


@pytest.mark.parametrize(
    ("family", "dtype", "other_dtype", "handoff", "codec"),
    [
        ("gemma2", "float32", "float32", "pull", "none"),
        ("gemma2", "bfloat16", "bfloat16", "push", "none"),
        ("phi3_longrope", "float32", "float32", "push", "none"),
        ("mistral", "bfloat16", "bfloat16", "pull", "none"),
        ("llama", "float32", "float32", "push", "int8"),
        ("gemma2", "bfloat16", "bfloat16", "push", "fp8"),
        ("llama", "float32", "bfloat16", "push", "none"),
        ("gemma2", "bfloat16", "float32", "pull", "none"),
    ],
)
def test_right_kv_is_never_suspected(
    family: str,
    dtype: str,
    other_dtype: str,
    handoff: str,
    codec: str,
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
) -> None:
    """Windows that prompts outgrow, both ways of RoPE, prompts that share what is cached, KV that
    has lost something on its way."""
    model = random_checkpoint(tmp_path / family, family)
    asked = prompts(*range(1, 60, 4), 63, 64, 65, 128, 200, 270, 300)
    asked += [[*asked[-1][:208], *prompt[:20]] for prompt in asked[:8]]
    mixed = dtype != other_dtype
    changes: dict[str, object] = {"codec": codec, "allow_mixed_precision": mixed}
    changes |= {"handoff": handoff}
    workers = [
        (hosts[0], settings(model, "prefill-0", Role.PREFILL, dtype=dtype, **changes)),
        (hosts[1], settings(model, "decode-0", Role.DECODE, dtype=other_dtype, **changes)),
    ]
    with running_cluster(model, workers) as cluster:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda prompt: ask(cluster, prompt), asked))
        wait_until(lambda: sum(checks(cluster, "decode-0").values()) >= len(asked), "all are told")
        found = checks(cluster, "decode-0")
    assert found == {"passed": len(asked), "mismatched": 0}
