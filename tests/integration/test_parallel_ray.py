"""Workers of several ranks on a real Ray: what is set aside for them, KV between degrees, and ranks
that die or hang: their worker is replaced, no token is lost, nothing is left behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay import Client
from tests.integration.ray_head import Head, Marked, ray_head, until
from tests.integration.test_handoff_exact import prompts
from tests.integration.test_serve_ray import KVRELAY, PLAIN, addresses, assert_nothing_is_left
from tests.models import random_checkpoint
from tests.reference import Reference, assert_same_tokens, generate_reference

pytestmark = pytest.mark.ray

TOKENS = 64
LENGTHS = [3, 40, 100, 200]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head({}, with_dashboard=True) as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KV head, which both ranks have."""
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=1)


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    return [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in prompts(LENGTHS)]


def pool(role: str, tensor: int = 1, stages: int = 1) -> dict[str, object]:
    parallel = {"tensor": tensor, "pipeline": stages}
    return {"role": role, "cpu_threads": tensor * stages, "parallel": parallel}


@contextmanager
def serving(
    head: Head, folder: Path, model: Path, *pools: dict[str, object]
) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """The gRPC address, the log, the driver. Every decode worker has its turn."""
    path, log = folder / "cluster.yaml", folder / "serve.log"
    config = {
        "name": "ranks",
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"kv_memory": "16MiB", "profile": "off", "compile": "off", "rank_timeout": "8s"},
        "attention": {"backend": "sdpa"},
        "router": {"placement": {"policy": "round_robin"}},
        "workers": [one | {"cpu_pinning": "off"} for one in pools],
    }
    path.write_text(yaml.safe_dump(config))
    driver = head.joined().start(KVRELAY, "serve", path, *PLAIN, log=log)
    http, grpc = addresses(driver, log)
    yield grpc, log, driver
    driver.terminate()
    assert driver.wait(60) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


def ask_all(grpc: str, references: list[Reference]) -> None:
    with ThreadPoolExecutor(len(references)) as threads:
        answers = [threads.submit(ask, grpc, reference) for reference in references]
        for reference, answer in zip(references, answers, strict=True):
            assert_same_tokens(reference, answer.result())


def ask(grpc: str, reference: Reference) -> list[int]:
    with Client(grpc, timeout_s=120) as client:
        answer = client.generate(
            reference.prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0
        )
    return list(answer.token_ids)


def ranks(here: Marked) -> list[psutil.Process]:
    """All but the first of each worker."""
    found = []
    for process in here.processes():
        with suppress(psutil.Error):
            if "engine.follower" in process.cmdline():
                found.append(process)
    return found


def cpus_of(head: Head) -> dict[str, float]:
    """# worker |-> the CPUs that Ray has set aside for it"""
    show = (
        "import json, ray; from ray.util.state import list_actors; "
        "print(json.dumps([[a.name, a.required_resources] for a in list_actors(detail=True) "
        "if a.state == 'ALIVE']))"
    )
    ray_env = Marked(head.joined().env | {"RAY_ADDRESS": head.dashboard})
    rows = json.loads(ray_env.run(sys.executable, "-c", show).splitlines()[-1])
    return {name.rpartition("/")[2]: dict(asked).get("CPU", 0.0) for name, asked in rows if name}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(pool("prefill", 2), pool("decode")), (pool("prefill", stages=2), pool("decode", 2))],
    ids=["ranks to one", "stages to ranks"],
)
def test_degrees_differ_and_tokens_do_not(
    prefill: dict[str, Any],
    decode: dict[str, Any],
    head: Head,
    model: Path,
    references: list[Reference],
    tmp_path: Path,
) -> None:
    with serving(head, tmp_path, model, prefill, decode) as (grpc, _, _):
        ask_all(grpc, references)
        threads = (prefill["cpu_threads"], decode["cpu_threads"])
        assert len(ranks(head.marked)) == sum(threads) - 2, "each but the first of a worker"
        cpus = cpus_of(head)
        assert (cpus["prefill-0"], cpus["decode-0"]) == threads


@pytest.mark.long
def test_a_rank_that_dies_or_hangs_is_replaced_with_its_worker(
    head: Head, model: Path, references: list[Reference], tmp_path: Path
) -> None:
    pools = (pool("prefill"), pool("decode", 2), pool("decode"))
    with serving(head, tmp_path, model, *pools) as (grpc, log, _):

        def replaced(harm: Callable[[psutil.Process], None], told: str, lives: int) -> None:
            (doomed,) = ranks(head.marked)
            harm(doomed)
            ask_all(grpc, references)
            until(lambda: len(re.findall(r"decode-0 serves on", log.read_text())) == lives)
            assert re.search(rf"decode-0 is lost: .*(?:{told})", log.read_text()), log.read_text()
            assert not doomed.is_running()
            assert len(ranks(head.marked)) == 1

        until(lambda: "decode-0 serves on" in log.read_text())  # the cluster serves without it too
        replaced(psutil.Process.kill, "rank 1 has ended with exit code -9|rank 1 is gone", 2)
        replaced(psutil.Process.suspend, "rank 1 is gone, or hangs", 3)
        ask_all(grpc, references)
