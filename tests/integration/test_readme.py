"""The README's Python snippets run as they stand, against a live cluster of the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.bundled import checkpoint_path
from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from router.text.request_fields import NO_MATCH, TierMatch
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, split_workers

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:50051"
"""The addresses that the README uses: those of `kvrelay serve`."""
PATIENCE_S = 120.0


TIERS = QosTiers(tiers=(QosTier(name="premium"), QosTier(name="free")), default="free")
MATCH = TierMatch(values={"premium": "premium"})


@pytest.fixture(
    scope="module", params=[(ONE_TIER, NO_MATCH), (TIERS, MATCH)], ids=["one tier", "tiers"]
)
def cluster(
    request: pytest.FixtureRequest, hosts: tuple[WorkerHost, WorkerHost]
) -> Iterator[Cluster]:
    """As `kvrelay serve` starts it without a cluster file, and as deploy/configs/qos.yaml does."""
    model = Path(checkpoint_path())
    tiers, match = request.param
    workers = split_workers(hosts, model, qos=tiers)
    router = {"qos": tiers, "tier_match": match}
    with running_cluster(model, workers, served_model_name="kvrelay-tiny", **router) as cluster:
        yield cluster


def run(snippet: str, cluster: Cluster) -> str:
    """What it prints."""
    http = cluster.http_url.removeprefix("http://")
    code = snippet.replace(HTTP, http).replace(GRPC, cluster.grpc_address)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_snippets_for_both_clients() -> None:
    assert [HTTP in snippet for snippet in SNIPPETS] == [True, False]
    assert "import OpenAI" in SNIPPETS[0] and "import Client" in SNIPPETS[1]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["openai", "client"])
def test_a_snippet_runs_as_it_stands(snippet: str, cluster: Cluster) -> None:
    out = run(snippet, cluster)
    assert out.strip()
    assert ("'prefill': " in out) == ("ledger" in snippet)
