"""Workers of several ranks in a live cluster: KV goes between any degrees, and a rank that dies
takes only its worker along."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cluster.cli.status import kv
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay import Client
from kvrelay.types import Role
from tests.access import ACCESS
from tests.integration.plain_kit import KVRELAY, Process, RouterAddresses, start_router
from tests.integration.ray_head import Marked, marked, until
from tests.integration.split_kit import WorkerHost, running_cluster, worker_settings
from tests.integration.test_handoff_exact import ask, check, prompts
from tests.models import random_checkpoint
from tests.reference import generate_reference

TOKENS = 32
LENGTHS = [1, 16, 65, 200]


@pytest.mark.parametrize(
    ("family", "degrees", "changes"),
    [
        ("llama", (2, 1), {}),
        pytest.param("gemma2", (1, 2), {}, marks=pytest.mark.long),
        ("mistral", (2, 2), {"handoff": "pull"}),
        pytest.param("mixtral", (2, 1), {}, marks=pytest.mark.long),
        ("qwen3", (1, 2), {"handoff": "pull"}),
    ],
)
def test_degrees_differ_and_tokens_do_not(
    family: str,
    degrees: tuple[int, int],
    changes: dict[str, str],
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
) -> None:
    heads = 1 if family == "qwen3" else 2  # for KV: one is on both ranks
    model = random_checkpoint(tmp_path / family, family, num_key_value_heads=heads)
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts(LENGTHS)
    references = [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked]
    roles = (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
    workers = [
        (host, worker_settings(name, role, model, tensor=tensor, cpu_threads=tensor, **changes))
        for host, (name, role), tensor in zip(hosts, roles, degrees, strict=True)
    ]
    with running_cluster(model, workers) as cluster:
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(lambda prompt: ask(cluster, prompt, tokens=TOKENS), asked))
        again = ask(cluster, asked[-1], tokens=TOKENS)  # its beginning is cached now
    check(together, references)
    check([again], references[-1:])
    assert not ranks_of(hosts), "they end with their workers"


def ranks_of(hosts: tuple[WorkerHost, WorkerHost]) -> list[psutil.Process]:
    return [child for host in hosts for child in children(host.pid)]


def children(worker: int) -> list[psutil.Process]:
    """Its ranks; not the process that tells how it ended."""
    found = psutil.Process(worker).children()
    return [child for child in found if "cluster.process.witness" not in child.cmdline()]


def test_a_bad_degree_is_refused_in_a_line(
    hosts: tuple[WorkerHost, WorkerHost], llama: Path
) -> None:
    settings = worker_settings("decode-0", Role.DECODE, llama, tensor=3, cpu_threads=3)
    with pytest.raises(AssertionError, match=r"parallel\.tensor 3 can't split the heads"):
        hosts[0].start(settings)
    assert not ranks_of(hosts)


@pytest.fixture
def here() -> Iterator[Marked]:
    with marked() as environment:
        yield environment
        until(lambda: not environment.processes())  # all end by themselves, the witnesses last


def start_worker(
    here: Marked, router: RouterAddresses, role: str, log: Path, *, tensor: int = 1, stages: int = 1
) -> Process:
    options = (f"--role={role}", f"--tensor={tensor}", f"--pipeline={stages}")
    options += (f"--cpu-threads={tensor * stages}", "--device=cpu")
    small = ("--set=engine.kv_memory=16MiB", "--set=model.dtype=float32")
    small += ("--set=engine.rank_timeout=8s", "--set=engine.profile=off")
    small += ("--set=engine.compile=off", "--set=attention.backend=sdpa")  # nothing is built
    return here.start(KVRELAY, "worker", f"--join={router.internal}", *options, *small, log=log)


def generate(router: RouterAddresses, number: int) -> tuple[int, ...]:
    with Client(router.grpc, timeout_s=60) as client:
        answer = client.generate(
            f"It was {number}", max_tokens=200, ignore_eos=True, temperature=0.0
        )
    return answer.token_ids


def rank_of(worker: Process) -> psutil.Process:
    (rank,) = children(worker.pid)
    return rank


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        pytest.param(
            psutil.Process.kill, "rank 1 has ended with exit code -9|rank 1 is gone", id="killed"
        ),
        pytest.param(
            psutil.Process.suspend,
            "rank 1 is gone, or hangs",
            id="stopped",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_is_lost_takes_its_worker_along_and_no_request(
    harm: Callable[[psutil.Process], None], told: str, here: Marked, tmp_path: Path
) -> None:
    router, address = start_router(here, tmp_path / "router")
    prefill = start_worker(here, address, "prefill", tmp_path / "prefill")
    decode = [
        start_worker(here, address, "decode", tmp_path / f"decode-{i}", tensor=2) for i in (0, 1)
    ]
    until(lambda: len(servers(address)) == 3)
    expected = [generate(address, number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(generate, address, number % 4) for number in range(12)]
        name = until(lambda: busy(address))
        (doomed,) = [number for number, one in enumerate(decode) if name == f"decode-{one.pid}"]
        rank = rank_of(decode[doomed])
        harm(rank)
        assert [one.result() for one in asked] == expected * 3
    assert decode[doomed].wait(30) != 0
    said = (tmp_path / f"decode-{doomed}").read_text()
    assert re.search(told, said), said
    assert not rank.is_running()

    orphan = rank_of(decode[1 - doomed])
    decode[1 - doomed].kill()
    decode[1 - doomed].wait(30)
    until(lambda: not orphan.is_running())
    for process in (prefill, router):
        process.terminate()
        assert process.wait(30) == 0


def servers(router: RouterAddresses) -> list[str]:
    with Client(router.grpc, timeout_s=30) as client:
        return [worker.role for worker in client.server_info().workers]


def busy(router: RouterAddresses, role: str = "decode") -> str:
    """The first worker of that role that holds KV of a request."""
    workers = kv.of_router(router.internal, ACCESS).workers
    holding = (one.worker for one in workers if one.held and one.worker.startswith(role))
    return next(holding, "")
