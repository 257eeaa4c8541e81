"""The `kvrelay` commands of the pages about operating run as they stand, in a folder with the files
that they name. That the program takes those of all pages is in tests/unit/test_docs_commands.py."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvrelay import Client
from tests.integration import kuberay
from tests.integration.manifests import Manifest, base_cluster, render
from tests.integration.plain_kit import (
    RouterAddresses,
    here,
    start_router,
    start_worker,
    until_joined,
)
from tests.integration.ray_head import BIN, NOTHING_BUILT, Head, Marked, ray_head, until
from tests.integration.test_apply_ray import names
from tests.integration.test_kubernetes import KUBERNETES_VERSION
from tests.integration.test_serve_ray import assert_nothing_is_left
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_docs_commands import in_blocks, in_sentences, trouble

__all__ = ["here"]

OPERATING = ("operating.md", "tuning.md", "elastic.md", "deploy-kubernetes.md")
ON_RAY = (
    "kvrelay apply cluster.yaml",
    "kvrelay status",
    "kvrelay status --kv",
    "kvrelay top",
    "kvrelay trace ID",
    "kvrelay scale prefill=2",
    "kvrelay scale decode=3",
    "kvrelay flip decode-1 prefill",
    "kvrelay drain decode-1",
    "kvrelay scale decode=1",
    "kvrelay stop",
)
"""In an order in which each finds what it names."""
IN_A_POD = "--address kvrelay-internal:50951 --token-file /run/secrets/kvrelay/token"
AS_PROCESSES = (
    "kvrelay top --address 127.0.0.1:50951 --once",
    "kvrelay controller --join HOST:PORT",
    f"kvrelay status {IN_A_POD}",
    f"kvrelay top {IN_A_POD}",
    f"kvrelay flip POD prefill {IN_A_POD}",
    "kvrelay flip WORKER ROLE --address HOST:PORT",
    "kvrelay drain WORKER --address HOST:PORT",
)
ALONE = (
    "kvrelay doctor",
    "kvrelay simulate deploy/configs/simulation.yaml --trace trace.jsonl",
)
ELSEWHERE = {
    "kvrelay serve": (
        "test_serve_ray.py::test_a_killed_router_comes_back_at_its_ports",
        'KVRELAY, "serve"',
    ),
    "kvrelay apply --yes --follow": (
        "test_node_drains.py::test_the_worker_of_a_pod_that_ends_goes_on_elsewhere",
        "ours.submit(job)",
    ),
    "kvrelay apply": (
        "test_apply_ray.py::test_a_cluster_is_scaled_drained_and_changed_while_it_serves",
        'KVRELAY, "apply", file, "--yes", "--follow"',
    ),
    "kvrelay scale": (
        "test_apply_ray.py::test_a_cluster_is_scaled_drained_and_changed_while_it_serves",
        'KVRELAY, "scale", "decode=2"',
    ),
    "kvrelay scale decode=3 --address HOST:PORT": (
        "test_apply_ray.py::test_a_cluster_is_scaled_drained_and_changed_while_it_serves",
        'KVRELAY, "scale", "decode=2", *router',
    ),
    "kvrelay simulate": (
        "test_documented_commands.py::test_what_needs_no_cluster_runs",
        'parametrize("line", ALONE)',
    ),
    "kvrelay pool-node": (
        "test_kubernetes_plain.py::test_the_pool_nodes_command_keeps_what_a_worker_computed",
        '"pool": pool_node()',
    ),
    "kvrelay controller": (
        "test_kubernetes_plain.py::test_the_commands_of_all_containers_serve_and_drain",
        '"controller": controller()',
    ),
}
"""# command that is named without what it needs, or that runs where its page's own files are |-> a
test that runs it, and how"""
NOT_RUN = {
    "kubectl": "it needs an API server; what needs none of it runs below",
    "docker": "it needs a daemon; test_image.py runs the steps without one",
    "curl": "it asks through kubectl's port-forward; below it asks a router of this machine",
}
SECRETS = {
    "kvrelay-secrets": {"token", "key"},
    "kvrelay-redis": {"password"},
    "kvrelay-hub": {"token"},
}
"""# Secret of the manifests |-> its keys"""
CLUSTER = """
model: {dtype: float32}
engine: {compile: "off", profile: "off"}
attention: {backend: sdpa}
router: {http_port: 0, grpc_port: 0}
pool: {enabled: "off"}
workers:
  - {role: prefill, cpu_threads: 1, resources: {CPU: 0.5}}
  - {role: decode, cpu_threads: 1, resources: {CPU: 0.5}}
"""
REQUEST = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}
ENDS_BY_CTRL_C = ("kvrelay top", "kvrelay controller")


def text_of(page: str) -> str:
    return (REPOSITORY / "docs" / page).read_text()


def commands(page: str) -> set[str]:
    text = text_of(page)
    found = (*in_blocks(text), *in_sentences(text))
    return {line.partition(" #")[0].strip() for line in found}


@pytest.mark.parametrize("page", OPERATING)
def test_each_command_is_run_by_a_test(page: str) -> None:
    run = {*ON_RAY, *AS_PROCESSES, *ALONE}
    assert commands(page) <= run | {*ELSEWHERE}


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_runs_elsewhere_is_run_there(line: str) -> None:
    where, how = ELSEWHERE[line]
    file, _, test = where.partition("::")
    text = (Path(__file__).parent / file).read_text()
    (found,) = [
        part
        for part in ast.parse(text).body
        if isinstance(part, ast.FunctionDef) and part.name == test
    ]
    first = min([found.lineno, *(one.lineno for one in found.decorator_list)])
    assert how in "\n".join(text.splitlines()[first - 1 : found.end_lineno])


def test_each_command_that_is_run_is_on_a_page() -> None:
    on_pages = set[str]().union(*map(commands, OPERATING))
    assert {*ON_RAY, *AS_PROCESSES, *ALONE, *ELSEWHERE} <= on_pages


def shell_lines() -> list[str]:
    """Of the Kubernetes page, without comments; those of its sentences too."""
    text = text_of("deploy-kubernetes.md")
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.S | re.M)
    shell = "\n".join(block for language, block in fenced if language in ("", "sh"))
    lines = shell.replace("\\\n", "").splitlines()
    lines += [line for line in re.findall(r"`(kubectl [^`]+)`", text) if len(line.split()) > 2]
    return [found for line in lines if (found := line.partition(" #")[0].strip())]


def test_other_programs_are_those_that_cannot_run_here() -> None:
    assert {line.split()[0] for line in shell_lines()} == {*NOT_RUN}


def kubectl(*words: str, line: str = "") -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["bash", "-c", line] if line else ["kubectl", *words]
    env = os.environ | {"KUBECONFIG": os.devnull}
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["deploy-kubernetes.md", "security.md"])
def test_the_pages_secrets_are_those_of_the_manifests(page: str) -> None:
    text = text_of(page).replace("\\\n", "")
    lines = re.findall(r"kubectl create secret [^`\n#]+", text)
    made = [yaml.safe_load(kubectl(line=f"{one} --dry-run=client -o yaml")) for one in lines]
    found = {one["metadata"]["name"]: {*one["data"]} for one in made}
    assert found.items() <= SECRETS.items()
    assert "kvrelay-secrets" in found
    assert page == "security.md" or found == SECRETS


def own_overlay(page: str, title: str, tree: Path, name: str = "mine") -> list[Manifest]:
    """What the overlay that a page shows makes, in a copy of the manifests."""
    (text,) = re.findall(rf"# {title}\n(.*?)\n *```", text_of(page), re.S)
    shutil.copytree(REPOSITORY / "deploy" / "kubernetes", tree, dirs_exist_ok=True)
    mine = tree / "overlays" / name
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(textwrap.dedent(text))
    (mine / "cluster.yaml").write_text("name: mine\n")
    return list(yaml.safe_load_all(kubectl("kustomize", str(mine))))


def containers(made: list[Manifest]) -> dict[str, Manifest]:
    """# Deployment |-> its container"""
    found = {}
    for one in made:
        if one["kind"] == "Deployment":
            (found[one["metadata"]["name"]],) = one["spec"]["template"]["spec"]["containers"]
    return found


def test_the_page_applies_the_overlay_that_it_shows() -> None:
    folders = {line.split()[-1] for line in shell_lines() if "apply -k" in line}
    assert folders == {"deploy/kubernetes/overlays/mine"}


def test_the_pages_own_overlay_renders(tmp_path: Path) -> None:
    made = own_overlay("deploy-kubernetes.md", "kustomization.yaml", tmp_path)
    (cluster,) = [one for one in made if one["kind"] == "RayCluster"]
    assert "redisAddress" in cluster["spec"]["gcsFaultToleranceOptions"]
    (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["image"] == "REGISTRY/kvrelay:cpu"
    (config,) = [one for one in made if one["kind"] == "ConfigMap"]
    assert config["metadata"]["name"] == "kvrelay-config", "the pods mount it by this name"
    assert config["data"]["cluster.yaml"] == "name: mine\n"


def test_the_pages_overlay_without_ray_serves_a_model_of_ones_own(tmp_path: Path) -> None:
    made = own_overlay("deploy-kubernetes.md", "kustomization.yaml, without Ray", tmp_path)
    for one in made:
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
    found = containers(made)
    assert {*found} == {"kvrelay-router", "kvrelay-prefill", "kvrelay-decode"}
    for name, container in found.items():
        is_worker = name != "kvrelay-router"
        assert container["image"] == "REGISTRY/kvrelay:cuda"
        assert "--model=Qwen/Qwen3-8B" in container["args"]
        assert ("--device=cuda" in container["args"]) == is_worker
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == is_worker
        assert trouble(shlex.join(["kvrelay", *container["args"]])) is None


def test_another_version_is_a_second_set_of_deployments(tmp_path: Path) -> None:
    """Behind the Services that are there, which select its pods too."""
    old = own_overlay("deploy-kubernetes.md", "kustomization.yaml, without Ray", tmp_path)
    new = own_overlay("operating.md", "kustomization.yaml, another version", tmp_path, "v2")
    assert {one["kind"] for one in new} == {"Deployment"}
    assert {*containers(new)} == {f"{name}-v2" for name in containers(old)}
    (service,) = [one for one in old if one["metadata"]["name"] == "kvrelay-internal"]
    for one in new:
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
        pod = one["spec"]["template"]
        assert one["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert one["spec"]["selector"]["matchLabels"]["version"] == "v2"
        claims = [v["persistentVolumeClaim"] for v in pod["spec"]["volumes"] if "secret" not in v]
        assert claims == [{"claimName": "kvrelay-weights"}], "the one that is there"
        if one["metadata"]["name"] == "kvrelay-router-v2":
            assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {one["image"] for one in containers(new).values()} == {"REGISTRY/kvrelay:NEW"}
    joined = containers(new)["kvrelay-decode-v2"]["args"]
    assert f"--join=dns:{service['metadata']['name']}:50951" in joined


def test_what_the_page_asks_an_api_server_for_is_in_the_manifests() -> None:
    made = [*render("cpu"), *render("plain")]
    known = {f"{one['kind']}/{one['metadata']['name']}".lower() for one in made}
    asked = [line.replace("rayjob ", "rayjob/") for line in shell_lines() if "kubectl" in line]
    named = {word for line in asked for word in re.findall(r"(?<= )\w+/kvrelay[\w-]*", line)}
    of_the_head = "service/kvrelay-head-svc"
    joins = kuberay.command(base_cluster(), "both", {})[-1]
    assert f"--address={of_the_head.partition('/')[2]}:" in joins
    deployments = {"deployment/kvrelay-decode", "deployment/kvrelay-router"}
    assert named - deployments == {"service/kvrelay", of_the_head, "rayjob/kvrelay-serve"}
    assert named <= known | {of_the_head}


def run(here: Marked, line: str, folder: Path) -> str:
    """What it prints, errors included."""
    words = shlex.split(line)
    with subprocess.Popen(
        [BIN / words[0], *words[1:]],
        cwd=folder,
        env=here.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        if line.startswith(ENDS_BY_CTRL_C) and "--once" not in line:
            first = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        else:
            first = ""
        printed = first + process.communicate(timeout=240)[0]
    assert process.returncode == 0, (line, printed)
    return printed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the pages name."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "trace.jsonl").write_text(json.dumps(REQUEST) + "\n")
    (tmp_path / "deploy").symlink_to(REPOSITORY / "deploy")
    return tmp_path


@pytest.mark.parametrize("line", ALONE)
def test_what_needs_no_cluster_runs(here: Marked, folder: Path, line: str) -> None:
    assert run(here, line, folder)


def test_processes_are_operated_by_the_pages_commands(here: Marked, folder: Path) -> None:
    router, at = start_router(here, folder / "router.log")
    workers = {
        role: start_worker(here, [at], role, folder / f"{role}.log", *NOTHING_BUILT)
        for role in ("prefill", "decode")
    }
    until_joined(at)
    names = {role: f"{role}-{process.pid}" for role, process in workers.items()}
    told = {line: run(here, placed(line, at, names["decode"]), folder) for line in AS_PROCESSES}
    assert names["decode"] in told[AS_PROCESSES[0]]
    assert answered(folder / "router.log") == "200"
    assert workers["decode"].wait(60) == 0, "it was drained"
    for process in (workers["prefill"], router):
        process.terminate()
        assert process.wait(60) == 0


def answered(log: Path) -> str:
    """The status that the Kubernetes page's `curl` gets, at the HTTP address of this router."""
    (line,) = [line for line in shell_lines() if line.startswith("curl")]
    found = re.search(r"^HTTP on (\S+)$", log.read_text(), re.M)
    assert found is not None
    asked = shlex.split(line.replace("http://localhost:8000", found[1]))
    told = ["--silent", "--output", os.devnull, "--write-out", "%{http_code}"]
    return subprocess.run([*asked, *told], capture_output=True, text=True, check=True).stdout


def placed(line: str, at: RouterAddresses, worker: str) -> str:
    """With this cluster's addresses and names in the places of those that a user fills in."""
    for address in ("127.0.0.1:50951", "kvrelay-internal:50951", "HOST:PORT"):
        line = line.replace(address, at.internal)
    line = line.replace("/run/secrets/kvrelay/token", os.environ["KVRELAY_TOKEN_FILE"])
    return line.replace("WORKER", worker).replace("POD", worker).replace("ROLE", "prefill")


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_cluster_on_ray_is_operated_by_the_pages_commands(folder: Path) -> None:
    with ray_head({}) as head:
        there = head.joined()
        for line in ON_RAY:
            printed = run(there, line.replace("ID", "asked") if "trace" in line else line, folder)
            if line == ON_RAY[0]:
                ask(head)
            if "trace" in line:
                assert "submitted" in printed
            if line == "kvrelay scale decode=1":
                assert len([name for name in names(head) if name.startswith("decode")]) == 1
        assert_nothing_is_left(head.marked)


def ask(head: Head) -> None:
    status = head.status()
    assert status is not None
    router: dict[str, object] = status["routers"][0]  # type: ignore[index]
    with Client(f"{router['host']}:{router['grpc_port']}", timeout_s=60) as client:
        until(lambda: client.server_info().ready)
        client.generate("It was", max_tokens=4, ignore_eos=True, request_id="asked")
