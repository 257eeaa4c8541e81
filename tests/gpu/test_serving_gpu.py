"""A router and two workers on one CUDA device, as processes: KV goes from one to the other over
cuda_ipc, or over nixl by way of the host, and the tokens are the model's. KV in fp8 travels as it
is, so the tokens are those of one worker; that test has not run on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.serving.plain_cluster import HANDED_OVER, PlainCluster, WorkerPlan, plain_cluster
from engine.bundled import checkpoint_path
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay import Client
from tests.reference import Reference, assert_same_tokens, generate_reference

pytestmark = pytest.mark.gpu
_TOKENS = 48
_SETTINGS = ("model.dtype=float32", "engine.kv_memory=1GiB")


@pytest.fixture(
    scope="module", params=[("push", "cuda_ipc"), ("pull", "cuda_ipc"), ("push", "nixl")], ids=str
)
def cluster(request: pytest.FixtureRequest) -> Iterator[PlainCluster]:
    handoff, link = request.param
    with _two_workers(f"transfer.handoff={handoff}", f"transfer.transports=[{link}]") as found:
        yield found


@contextmanager
def _two_workers(*further: str) -> Iterator[PlainCluster]:
    plans = [
        WorkerPlan(role=role, cores=(i,), device="cuda")
        for i, role in enumerate(("prefill", "decode"))
    ]
    settings = (*_SETTINGS, *further)
    with plain_cluster(checkpoint_path(), plans, settings, router_settings=HANDED_OVER) as found:
        yield found


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    model = load_model(open_checkpoint(str(checkpoint_path())), device="cpu", dtype="float32")
    return [generate_reference(model, prompt, tokens=_TOKENS) for prompt in _PROMPTS]


_PROMPTS = [
    [(7 * i + n) % 500 + 2 for i in range(length)] for n, length in enumerate((1, 17, 130, 400))
]


def test_tokens_are_the_model_s(cluster: PlainCluster, references: list[Reference]) -> None:
    for one, tokens in zip(references, _generated(cluster), strict=True):
        assert_same_tokens(one, tokens)


def _generated(cluster: PlainCluster) -> list[list[int]]:
    options = {"max_tokens": _TOKENS, "temperature": 0.0, "ignore_eos": True}
    with Client(f"127.0.0.1:{cluster.grpc_port}", timeout_s=60) as client:
        return [list(client.generate(one, **options).token_ids) for one in _PROMPTS]


@pytest.mark.parametrize("link", ["cuda_ipc", "nixl"])
def test_kv_in_fp8_travels_as_it_is(link: str) -> None:
    fp8 = "engine.kv_dtype=fp8"
    one = [WorkerPlan(role="both", cores=(0,), device="cuda")]
    with plain_cluster(checkpoint_path(), one, (*_SETTINGS, fp8)) as alone:
        expected = _generated(alone)
    with _two_workers(fp8, f"transfer.transports=[{link}]") as pair:
        assert _generated(pair) == expected
