"""The manifests without Ray: valid, in agreement with each other, and their commands serve."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import kubernetes_validate
import pytest

from cluster.config.schema import Config
from kvrelay import Client
from tests.integration.manifests import Manifest, one, render, render_with
from tests.integration.plain_kit import ADDRESSES, KVRELAY, Process
from tests.integration.ray_head import NOTHING_BUILT, Marked, free_ports, marked, until
from tests.integration.test_kubernetes import KEEPS_MODES, KUBERNETES_VERSION

OVERLAY = "plain"
ROLES = ("router", "prefill", "decode")


def deployment(role: str) -> Manifest:
    return one(OVERLAY, "Deployment", f"kvrelay-{role}")


def pod(role: str) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(role)["spec"]["template"]["spec"]
    return spec


def container(role: str) -> dict[str, Any]:
    (found,) = pod(role)["containers"]
    return dict(found)


def selected_by(labels: dict[str, str]) -> list[str]:
    """The roles whose pods have these labels."""
    return [
        role
        for role in ROLES
        if labels.items() <= deployment(role)["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_kubernetes_accepts_them() -> None:
    kinds = {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    assert {manifest["kind"] for manifest in render(OVERLAY)} == kinds
    for manifest in render(OVERLAY):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_nothing_is_there_once_only() -> None:
    assert [deployment(role)["spec"]["replicas"] for role in ROLES] == [2, 2, 2]


@pytest.mark.parametrize("role", ROLES)
def test_a_drain_and_a_roll_take_one_pod_of_a_kind(role: str) -> None:
    """Each is the disruption controller's to count: a Deployment has a scale."""
    budget = one(OVERLAY, "PodDisruptionBudget", f"kvrelay-{role}")["spec"]
    assert selected_by(budget["selector"]["matchLabels"]) == [role]
    assert budget["maxUnavailable"] < deployment(role)["spec"]["replicas"]
    rolls = deployment(role)["spec"]["strategy"]["rollingUpdate"]
    assert (rolls["maxSurge"], rolls["maxUnavailable"]) == (1, 0), "a successor first"


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_time_to_drain(role: str) -> None:
    (drain_s,) = re.findall(r"drain_timeout=(\d+)s", " ".join(container(role)["args"]))
    assert pod(role)["terminationGracePeriodSeconds"] >= int(drain_s) + 5


@pytest.mark.parametrize("role", ROLES)
def test_pods_of_a_kind_are_spread_over_nodes(role: str) -> None:
    """Where there is room: a node that dies should not take all of them."""
    (spread,) = pod(role)["topologySpreadConstraints"]
    assert selected_by(spread["labelSelector"]["matchLabels"]) == [role]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("role", ROLES)
def test_weights_and_compiled_code_are_on_a_volume_of_all(role: str) -> None:
    made = of_component("weights", "Deployment", f"kvrelay-{role}")
    kubernetes_validate.validate(made, KUBERNETES_VERSION, strict=True)
    spec = made["spec"]["template"]["spec"]
    (run,) = spec["containers"]
    env = {entry["name"]: entry for entry in run["env"]}
    (mount,) = [one["mountPath"] for one in run["volumeMounts"] if one["name"] == "weights"]
    assert Path(env["HF_HOME"]["value"]).parent == Path(mount)
    assert env["XDG_CACHE_HOME"]["value"] == mount
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
    assert {"POD_IP"} <= {*env}, "and what was there stays"
    (volume,) = [one for one in spec["volumes"] if one["name"] == "weights"]
    claim = of_component("weights", "PersistentVolumeClaim", "kvrelay-weights")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", KEEPS_MODES


@pytest.mark.parametrize("role", ROLES)
def test_a_signal_is_all_that_a_pod_needs_to_end(role: str) -> None:
    """The kubelet sends it when the pod leaves its Services' endpoints, not after: who has not
    heard yet still asks a router, which takes requests for so long after the signal: that is in
    test_plain_processes.py."""
    assert "lifecycle" not in container(role)
    if role == "router":
        assert "router.lame_duck" not in " ".join(container(role)["args"])
        probe = container(role)["readinessProbe"]
        lame_duck_s = Config().router.lame_duck
        assert lame_duck_s is not None
        assert lame_duck_s > probe["periodSeconds"] * probe["failureThreshold"]


def test_services_lead_to_the_routers_only() -> None:
    ports = {port["containerPort"] for port in container("router")["ports"]}
    for name in ("kvrelay", "kvrelay-grpc", "kvrelay-internal"):
        service = one(OVERLAY, "Service", name)["spec"]
        assert selected_by(service["selector"]) == ["router"]
        assert {port["targetPort"] for port in service["ports"]} <= ports
    internal = one(OVERLAY, "Service", "kvrelay-internal")["spec"]
    assert internal["publishNotReadyAddresses"], "a router is ready once workers have joined"
    assert internal["clusterIP"] == "None", "each worker joins each router"


@pytest.mark.parametrize("role", ROLES)
def test_pods_keep_to_the_restricted_standard(role: str) -> None:
    assert pod(role)["securityContext"]["runAsNonRoot"]
    assert pod(role)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(role)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.fixture
def here() -> Iterator[Marked]:
    with marked() as environment:
        yield environment


def command(made: Manifest, role: str, tmp_path: Path, ports: dict[str, str]) -> list[str]:
    """That of the pods' container, as the kubelet runs it, but on this machine's addresses and
    files."""
    (run,) = made["spec"]["template"]["spec"]["containers"]
    args = " ".join(run["args"])
    args = args.replace("$(POD_IP)", "127.0.0.1").replace("$(POD_NAME)", f"{role}-x")
    args = args.replace("kvrelay-internal", "localhost").replace("/tmp/", f"{tmp_path}/{role}-")
    args = args.replace("/run/secrets/kvrelay", str(tmp_path))
    for port, free in ports.items():
        args = re.sub(rf"\b{port}\b", free, args)
    return args.split()


def of_component(component: str, kind: str, name: str) -> Manifest:
    """The overlay's manifest of this name, with one of the components."""
    found = (m for m in render_with(OVERLAY, component) if m["kind"] == kind)
    (made,) = [manifest for manifest in found if manifest["metadata"]["name"] == name]
    return made


def controller() -> Manifest:
    return of_component("roles", "Deployment", "kvrelay-controller")


def pool_node() -> Manifest:
    return of_component("pool", "DaemonSet", "kvrelay-pool")


def worker_beside_it(role: str) -> Manifest:
    return of_component("pool", "Deployment", f"kvrelay-{role}")


def test_roles_are_kept_by_one_controller_that_keeps_nothing() -> None:
    kubernetes_validate.validate(controller(), KUBERNETES_VERSION, strict=True)
    spec = controller()["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    made, *_ = spec["template"]["spec"]["containers"]
    assert made["securityContext"] == container("prefill")["securityContext"]
    assert spec["template"]["spec"]["securityContext"] == pod("prefill")["securityContext"]


def own_ports() -> dict[str, str]:
    """# port of the manifests |-> free port of this machine"""
    ports = ["8000", "50051", "8900", "50951"]
    return dict(zip(ports, map(str, free_ports(len(ports))), strict=True))


def start_all(
    here: Marked, tmp_path: Path, ports: dict[str, str], made: dict[str, Manifest]
) -> dict[str, Process]:
    """Each container's command; the first is the router's, which listens before the next starts."""
    started = {}
    for role, manifest in made.items():
        built = NOTHING_BUILT if role in ("prefill", "decode") else ()
        log, words = tmp_path / f"{role}.log", command(manifest, role, tmp_path, ports)
        started[role] = here.start(KVRELAY, *words, *built, log=log)
        if role == "router":
            until(lambda: re.search(ADDRESSES, (tmp_path / "router.log").read_text()))
    return started


def test_the_pool_node_is_where_its_workers_find_it() -> None:
    kubernetes_validate.validate(pool_node(), KUBERNETES_VERSION, strict=True)
    its = pool_node()["spec"]["template"]["spec"]
    args = its["containers"][0]["args"]
    (name,) = [one.removeprefix("--name=") for one in args if one.startswith("--name=")]
    for role in ("prefill", "decode"):
        pods = worker_beside_it(role)["spec"]["template"]["spec"]
        assert its["hostNetwork"] and pods["hostNetwork"], "one network namespace"
        assert its["dnsPolicy"] == pods["dnsPolicy"] == "ClusterFirstWithHostNet", "dns: addresses"
        assert its["securityContext"] == pods["securityContext"], "one user"
        assert f"--pool={name}" in pods["containers"][0]["args"]
    rest = worker_beside_it("prefill")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [one for one in rest if "--pool" not in one] == container("prefill")["args"]


def test_the_pools_memory_is_within_its_pods_limit() -> None:
    (made,) = pool_node()["spec"]["template"]["spec"]["containers"]
    (size,) = re.findall(r"--host-memory=(\d+)GiB", " ".join(made["args"]))
    assert int(made["resources"]["limits"]["memory"].removesuffix("Gi")) >= int(size) + 1


def test_what_is_on_the_hosts_network_may_join_the_routers() -> None:
    """No policy selects such a pod."""
    policy = of_component("pool", "NetworkPolicy", "kvrelay-routers")["spec"]
    (joins,) = pool_node()["spec"]["template"]["spec"]["containers"][0]["args"][4:5]
    assert {"ports": [{"port": int(joins.rpartition(":")[2])}]} in policy["ingress"]


def test_the_pool_nodes_command_keeps_what_a_worker_computed(here: Marked, tmp_path: Path) -> None:
    ours, name = own_ports(), f"plain-{uuid4().hex[:8]}"
    made = {"router": deployment("router"), "pool": pool_node()}
    made |= {role: worker_beside_it(role) for role in ("prefill", "decode")}
    text = json.dumps(made).replace("--pool=kvrelay", f"--pool={name}")
    made = json.loads(text.replace("--host-memory=2GiB", "--host-memory=64MiB"))
    (run,) = made["pool"]["spec"]["template"]["spec"]["containers"]
    run["args"] = [one.replace("--name=kvrelay", f"--name={name}") for one in run["args"]]
    started = start_all(here, tmp_path, ours, made)
    until(lambda: all((tmp_path / f"{role}-ready").exists() for role in ("prefill", "decode")))
    with Client(f"127.0.0.1:{ours['50051']}", timeout_s=60) as client:
        until(lambda: client.server_info().ready)
        client.generate("It was the best of times " * 20, max_tokens=8, ignore_eos=True)
    until(lambda: kept_by_the_pool(here, tmp_path, ours["50951"]) > 0)
    for process in (started[role] for role in ("prefill", "decode", "pool", "router")):
        process.terminate()
        assert process.wait(60) == 0, [log.read_text() for log in tmp_path.glob("*.log")]


def kept_by_the_pool(here: Marked, tmp_path: Path, port: str) -> int:
    """Blocks, as the router is told by the one pool node that joined it."""
    where = ("--address", f"127.0.0.1:{port}", "--token-file", tmp_path / "token")
    told = json.loads(here.run(KVRELAY, "status", "--kv", "--format", "json", *where))
    tiers = [tier for node in told["pool_nodes"] for tier in node["tiers"]]
    states = [state for tier in tiers for state in tier["states"]]
    return sum(int(one["blocks"]) for one in states if one["state"] == "cached")


def metrics(tmp_path: Path, port: str) -> str:
    token = (tmp_path / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers).text


def test_the_commands_of_all_containers_serve_and_drain(here: Marked, tmp_path: Path) -> None:
    ours = own_ports()
    made = {role: deployment(role) for role in ROLES} | {"controller": controller()}
    started = start_all(here, tmp_path, ours, made)
    workers = ("prefill", "decode")
    until(lambda: all((tmp_path / f"{role}-ready").exists() for role in workers))
    with Client(f"127.0.0.1:{ours['50051']}", timeout_s=60) as client:
        until(lambda: client.server_info().ready)
        answer = client.generate("It was", max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids) == 8
    for role in workers:
        labels = rf'model_name="[^"]+",pool="kvrelay-{role}",role="{role}"'
        assert re.search(rf"kvrelay:desired_workers{{{labels}}}", metrics(tmp_path, ours["8900"]))
    until(lambda: "roles follow the offered work" in (tmp_path / "controller.log").read_text())
    for role in ("controller", *workers, "router"):
        started[role].terminate()
    for role, process in started.items():
        assert process.wait(60) == 0, (tmp_path / f"{role}.log").read_text()
    assert not any((tmp_path / f"{role}-ready").exists() for role in workers)
