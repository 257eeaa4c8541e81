"""Unmodified clients against a real cluster: each call streamed and not, where they have both.

`make test-clients` runs it. The first run installs the clients, which takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from engine.bundled import checkpoint_path
from tests.clients.environments import (
    AIPERF,
    GUIDELLM,
    LM_EVAL,
    SDK_ENVIRONMENT,
    Environment,
    NotInstalled,
    python_of,
)
from tests.clients.sdk_calls import SDKS
from tests.integration.split_kit import Cluster

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]
MODEL = "test-model"
CALLS = Path(__file__).with_name("sdk_calls.py")
RUN_S = 600
REQUESTS = 6
UNENDING = {("pydantic-ai-slim", "messages, output tool")}
"""The tiny model calls the tool again and again until its context is full. `test_sdks_with_tools`
makes these calls with a model that ends."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(
    environment: Environment, command: str, *arguments: object, folder: Path, **variables: str
) -> str:
    """stdout of a program there. Skips where it can't be installed."""
    try:
        python = python_of(environment)
    except NotInstalled as error:
        pytest.skip(str(error))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python.parent / command, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env | OFFLINE | {"CLIENTS_MODEL": MODEL} | variables,
        timeout=RUN_S,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


@pytest.mark.parametrize("sdk", SDKS)
def test_sdks(bundled: Cluster, tmp_path: Path, sdk: str) -> None:
    out = run(SDK_ENVIRONMENT, "python", CALLS, bundled.http_url, sdk, folder=tmp_path)
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    failed = {one["call"]: one["error"] for one in told if one["error"]}
    assert {call: why for call, why in failed.items() if (sdk, call) not in UNENDING} == {}
    assert len(told) >= 5


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(bundled: Cluster, tmp_path: Path, path: str, streamed: bool) -> None:
    backend = f"kind=openai_http,target={bundled.http_url},model={MODEL},request_format={path}"
    run(
        GUIDELLM,
        "guidellm",
        "run",
        *("--backend", f"{backend},stream={str(streamed).lower()}"),
        *("--tokenizer", f"kind=hf_auto,model={checkpoint_path()}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={tmp_path}/told.json", "--disable-console"),
        folder=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf(bundled: Cluster, tmp_path: Path, kind: str, streamed: bool) -> None:
    run(
        AIPERF,
        "aiperf",
        "profile",
        *("-m", MODEL, "--url", bundled.http_url, "--endpoint-type", kind),
        *(["--streaming"] if streamed else []),
        *("--tokenizer", checkpoint_path()),
        *("--concurrency", 2, "--request-count", REQUESTS, "--isl", 32, "--osl", 8),
        *("--artifact-dir", tmp_path / "told", "--ui", "none"),
        folder=tmp_path,
        HF_HUB_OFFLINE="",  # offline it takes a folder for the name of a repository
    )
    (path,) = (tmp_path / "told").rglob("profile_export_aiperf.json")
    told = json.loads(path.read_text())
    assert told["request_count"]["avg"] == REQUESTS
    assert not told.get("error_summary")


CHOICES = [{"question": f"{i} and {i} are", "answer": i % 2} for i in range(4)]
TASK = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": [" even", " odd"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_lm_eval(bundled: Cluster, tmp_path: Path) -> None:
    """loglikelihood by echo and logprobs, and generation; its tasks are local."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in CHOICES))
    for name, own in TASKS.items():
        task = {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}, **TASK, **own}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    url = f"{bundled.http_url}/v1/completions"
    run(
        LM_EVAL,
        "lm_eval",
        *("--model", "local-completions", "--tasks", ",".join(TASKS)),
        *("--model_args", f"model={MODEL},base_url={url},tokenizer={checkpoint_path()}"),
        *("--include_path", tmp_path, "--output_path", tmp_path / "told"),
        folder=tmp_path,
    )
    (path,) = (tmp_path / "told").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    assert 0.0 <= results["tiny_choice"]["acc,none"] <= 1.0
    assert "exact_match,none" in results["tiny_generate"]
