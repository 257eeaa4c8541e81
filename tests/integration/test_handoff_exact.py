"""Token-exact through the handoff: prefill and decode in two processes, against generate."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Role
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import Reference, assert_same_tokens, generate_reference

TOKENS = 64
# Block borders at multiples of 16, chunk borders at multiples of 64.
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 200, 700]
# family |-> a seed whose random model says something after every prompt
FAMILIES = {
    "llama": 0,
    "mistral": 0,
    "qwen2": 0,
    "qwen3": 0,
    "gemma2": 0,
    "gemma3_text": 1,
    "phi3": 0,
    "olmo2": 1,
    "mixtral": 0,
}


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def ask(cluster: Cluster, prompt: list[int], *, tokens: int = TOKENS) -> list[int]:
    answer = cluster.completion(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_split_equals_generate(
    family: str, hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    model = random_checkpoint(tmp_path / family, family, seed=FAMILIES[family])
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts(LENGTHS)
    references = [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked]
    assert min(len(set(reference.tokens)) for reference in references) >= 20
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, model)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, model)),
    ]
    with running_cluster(model, workers) as cluster:
        alone = [ask(cluster, prompt) for prompt in asked[:2]]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(lambda prompt: ask(cluster, prompt), asked))
        slabs_of_both(hosts)
    check(alone, references[:2])
    check(together, references)


def check(found: list[list[int]], references: list[Reference]) -> None:
    for ids, reference in zip(found, references, strict=True):
        assert_same_tokens(reference, ids)


def slabs_of_both(hosts: tuple[WorkerHost, WorkerHost]) -> None:
    """The slabs are one memory: the same memfd inode is mapped in two different processes."""
    assert hosts[0].pid != hosts[1].pid
    shared = mapped_slabs(hosts[0].pid) & mapped_slabs(hosts[1].pid)
    assert shared, "no slab is mapped in both processes"


def mapped_slabs(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    slabs = [line for line in lines if "memfd:kvrelay" in line and "last-words" not in line]
    return {line.split()[4] for line in slabs}
