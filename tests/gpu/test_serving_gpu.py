"""A router and two workers on one CUDA device, as processes: KV goes from one to the other over
cuda_ipc, or over nixl by way of the host, and the tokens are the model's."""

from __future__ import annotations

from collections.abc import Iterator

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
    plans = [
        WorkerPlan(role=role, cores=(i,), device="cuda")
        for i, role in enumerate(("prefill", "decode"))
    ]
    handoff, link = request.param
    how = (f"transfer.handoff={handoff}", f"transfer.transports=[{link}]")
    settings = (*_SETTINGS, *how)
    with plain_cluster(checkpoint_path(), plans, settings, router_settings=HANDED_OVER) as found:
        yield found


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    model = load_model(open_checkpoint(str(checkpoint_path())), device="cpu", dtype="float32")
    prompts = [[(7 * i + n) % 500 + 2 for i in range(length)] for n, length in enumerate(_LENGTHS)]
    return [generate_reference(model, prompt, tokens=_TOKENS) for prompt in prompts]


_LENGTHS = (1, 17, 130, 400)


def test_tokens_are_the_model_s(cluster: PlainCluster, references: list[Reference]) -> None:
    with Client(f"127.0.0.1:{cluster.grpc_port}", timeout_s=60) as client:
        for one in references:
            options = {"max_tokens": _TOKENS, "temperature": 0.0, "ignore_eos": True}
            assert_same_tokens(one, client.generate(one.prompt, **options).token_ids)
