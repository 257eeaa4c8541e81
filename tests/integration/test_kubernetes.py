"""The manifests: valid by their schemas, and in agreement with each other and the cluster file."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.config.load import load_config
from cluster.config.schema import Config
from tests.integration import kuberay
from tests.integration.manifests import (
    DEPLOY,
    OVERLAYS,
    Manifest,
    base_cluster,
    cluster_file,
    group_resources,
    groups,
    one,
    redis_manifest,
    render,
    render_with,
)

KUBERNETES_VERSION = "1.31"
CRDS = Path(os.environ.get("KVRELAY_CRDS", DEPLOY.parents[1] / "shared" / "crds"))

OWN_APIS = r"v1|apps/v1|policy/v1|networking.k8s.io/v1"
ROUTER_PODS = {"ray.io/cluster": "kvrelay", "ray.io/group": "router"}

KEEPS_MODES = "else each mount lets the group write what is compiled, and nobody takes it"

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def config_of(overlay: str, tmp_path: Path) -> Config:
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_file(overlay))
    return load_config(path)


def own_kinds(overlay: str) -> list[Manifest]:
    return [m for m in render(overlay) if re.fullmatch(OWN_APIS, m["apiVersion"])]


@each_overlay
def test_kubernetes_accepts_them(overlay: str) -> None:
    checked = own_kinds(overlay)
    kinds = {"ConfigMap", "Service", "NetworkPolicy"}
    if overlay == "gpu":
        kinds |= {"PodDisruptionBudget", "PersistentVolumeClaim", "StatefulSet"}
    assert {m["kind"] for m in checked} == kinds
    for manifest in checked:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_the_check_of_kubernetes_can_fail() -> None:
    broken = {**one("cpu", "Service", "kvrelay"), "spec": {"porst": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSION, strict=True)


@each_overlay
@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_kuberay_accepts_them(overlay: str, kind: str) -> None:
    crd_validator(kind).validate(one(overlay, kind))


def cluster_with(overlay: str, component: str) -> Manifest:
    """KubeRay accepts it."""
    (cluster,) = [m for m in render_with(overlay, component) if m["kind"] == "RayCluster"]
    crd_validator("RayCluster").validate(cluster)
    return cluster


@each_overlay
def test_kuberay_accepts_a_head_with_a_store(overlay: str) -> None:
    cluster = cluster_with(overlay, "head-store")
    assert cluster["spec"]["gcsFaultToleranceOptions"]["backend"] == "rocksdb"
    assert {**cluster["spec"], "gcsFaultToleranceOptions": None} == {
        **one(overlay, "RayCluster")["spec"],
        "gcsFaultToleranceOptions": None,
    }, "and nothing else"


@each_overlay
def test_a_redis_keeps_what_the_head_knows(overlay: str) -> None:
    """Its command, and what a head does with it, is in test_ray_head_restarts.py."""
    cluster = one("gpu", "RayCluster") if overlay == "gpu" else cluster_with(overlay, "head-redis")
    crd_validator("RayCluster").validate(cluster)
    kept = cluster["spec"]["gcsFaultToleranceOptions"]
    service, redis = redis_manifest("Service"), redis_manifest("StatefulSet")
    (port,) = service["spec"]["ports"]
    assert kept["redisAddress"] == f"{service['metadata']['name']}:{port['port']}"
    assert service["spec"]["selector"] == redis["spec"]["template"]["metadata"]["labels"]
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    assert [one["valueFrom"] for one in container["env"]] == [kept["redisPassword"]["valueFrom"]]
    (volume,) = redis["spec"]["volumeClaimTemplates"]
    assert [one["name"] for one in container["volumeMounts"]] == [volume["metadata"]["name"]]


@pytest.mark.parametrize("kind", ["StatefulSet", "Service", "NetworkPolicy"])
def test_kubernetes_accepts_the_redis(kind: str) -> None:
    made = redis_manifest(kind)
    kubernetes_validate.validate(made, KUBERNETES_VERSION, strict=True)
    if kind == "StatefulSet":
        pod = made["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_check_of_kuberay_can_fail() -> None:
    manifest = json.loads(json.dumps(one("cpu", "RayCluster")))
    manifest["spec"]["workerGroupSpecs"][0]["minReplica"] = 0
    assert not crd_validator("RayCluster").is_valid(manifest)


@cache
def crd_validator(kind: str) -> jsonschema.Draft7Validator:
    """Skips the test without KubeRay's definitions."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.exists():
        pytest.skip(f"no {path.name} in {CRDS}: KVRELAY_CRDS names the folder of KubeRay's CRDs")
    versions = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1"]
    return jsonschema.Draft7Validator(closed(schema))


def closed(schema: Any) -> Any:
    """Refuses unknown fields, as `kubectl apply` does."""
    match schema:
        case dict() if "properties" in schema:
            inner = {name: closed(value) for name, value in schema["properties"].items()}
            if schema.get("x-kubernetes-preserve-unknown-fields"):
                return schema | {"properties": inner}
            return schema | {"properties": inner, "additionalProperties": False}
        case dict():
            return {name: closed(value) for name, value in schema.items()}
        case _:
            return schema


@each_overlay
def test_no_rayservice(overlay: str) -> None:
    assert "RayService" not in {m["kind"] for m in render(overlay)}


@each_overlay
def test_every_worker_has_a_group_with_room(overlay: str, tmp_path: Path) -> None:
    config = config_of(overlay, tmp_path)
    asked: Counter[str] = Counter()
    for pool in config.workers:
        for name, amount in pool.resources.items():
            asked[name] += int(amount * pool.replicas.max)
    for name, amount in config.router.resources.items():
        asked[name] += int(amount * config.router.replicas)
    assert asked, "every process names its group"
    offered = {
        name: int(amount) * spec["maxReplicas"]
        for spec in groups(overlay).values()
        for name, amount in group_resources(spec).items()
    }
    assert all(offered[name] >= amount for name, amount in asked.items())


@each_overlay
def test_peers_over_shared_memory_share_a_pod(overlay: str, tmp_path: Path) -> None:
    config = config_of(overlay, tmp_path)
    assert config.transfer.transports is None, "auto: within a pod shared memory"
    used = {name for pool in config.workers for name in pool.resources}
    homes = [spec for spec in groups(overlay).values() if used & {*group_resources(spec)}]
    assert len(homes) == 1
    assert homes[0]["maxReplicas"] == 1


@each_overlay
def test_gpus_suffice(overlay: str, tmp_path: Path) -> None:
    config = config_of(overlay, tmp_path)
    wanted = sum(pool.replicas.max for pool in config.workers if pool.device == "cuda")
    limits = groups(overlay)["both"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits.get("nvidia.com/gpu", 0)) == wanted


@each_overlay
def test_the_pools_memory_is_within_the_pods(overlay: str, tmp_path: Path) -> None:
    """Shared memory counts to the container's limit; half is left to the workers."""
    pool = config_of(overlay, tmp_path).pool
    limits = groups(overlay)["both"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    room = int(limits["memory"].removesuffix("Gi")) * 2**30
    assert pool.host_memory is None or pool.host_memory <= room / 2
    assert pool.enabled == ("on" if overlay == "gpu" else "auto")


@each_overlay
def test_groups_scale_from_nothing(overlay: str) -> None:
    """A RayJob waits for its pods to be ready, and a router's is not before the job serves."""
    assert one(overlay, "RayCluster")["spec"]["enableInTreeAutoscaling"] is True
    assert {*groups(overlay)} == {"router", "prefill", "decode", "both"}
    for spec in groups(overlay).values():
        assert (spec["minReplicas"], spec["replicas"]) == (0, 0)
        assert spec["maxReplicas"] >= 1


@each_overlay
def test_the_autoscaler_is_version_2(overlay: str) -> None:
    """It drains a node before it removes it, and KubeRay restarts no pod behind its back."""
    spec = one(overlay, "RayCluster")["spec"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    pods = [spec["headGroupSpec"], *groups(overlay).values()]
    assert {pod["template"]["spec"].get("restartPolicy", "Never") for pod in pods} == {"Never"}


def test_a_group_is_started_as_kuberay_starts_it() -> None:
    bash, shell, _, line = kuberay.command(base_cluster(), "both", {})
    assert (bash, shell) == ("/bin/bash", "-c")
    assert line == (
        "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}; ray start "
        "--address=kvrelay-head-svc:6379 --block --dashboard-agent-listen-port=52365 "
        "--memory=8589934592 --metrics-export-port=8080 --num-cpus=4 "
        '--object-store-memory=100000000 --resources="{\\"kvrelay-both\\": 8}"'
    )
    head = kuberay.environment(base_cluster(), "head", "pod")
    assert head["RAY_enable_autoscaler_v2"] == "true"
    assert head["KVRELAY_CONFIG"] == "/etc/kvrelay/cluster.yaml"


@each_overlay
def test_services_and_probes_lead_to_the_router(overlay: str, tmp_path: Path) -> None:
    router = config_of(overlay, tmp_path).router
    assert router.host == "0.0.0.0"
    assert router.same_ports, "one Service leads to all of them"
    (container,) = groups(overlay)["router"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "http": router.http_port,
        "grpc": router.grpc_port,
        "metrics": router.internal_http_port,
        "internal-grpc": router.internal_grpc_port,
    }
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    for name, port in (("kvrelay", router.http_port), ("kvrelay-grpc", router.grpc_port)):
        service = one(overlay, "Service", name)
        assert service["spec"]["selector"] == {
            "ray.io/cluster": "kvrelay",
            "ray.io/group": "router",
        }
        assert [p["targetPort"] for p in service["spec"]["ports"]] == [port]


@each_overlay
def test_clients_find_no_internal_port(overlay: str, tmp_path: Path) -> None:
    router = config_of(overlay, tmp_path).router
    internal = {router.internal_http_port, router.internal_grpc_port}
    for name in ("kvrelay", "kvrelay-grpc"):
        ports = one(overlay, "Service", name)["spec"]["ports"]
        assert not internal & {port["targetPort"] for port in ports}


@each_overlay
def test_a_budget_lets_a_node_be_drained(overlay: str, tmp_path: Path) -> None:
    """A share or maxUnavailable needs a scale, which RayCluster hasn't: no eviction is allowed."""
    for budget in (m for m in render(overlay) if m["kind"] == "PodDisruptionBudget"):
        (least,) = (value for key, value in budget["spec"].items() if key != "selector")
        assert budget["spec"]["minAvailable"] == least
        assert budget["spec"]["selector"]["matchLabels"] == ROUTER_PODS
        assert 0 < least < config_of(overlay, tmp_path).router.replicas


def test_gpus_serve_a_model_whose_weights_are_fetched_once(tmp_path: Path) -> None:
    assert config_of("gpu", tmp_path).model.path is not None, "not the bundled one"
    (claim,) = [m for m in render("gpu") if m["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "pods of several nodes share it"
    for name, pod in pod_specs("gpu").items():
        (container,) = pod["containers"]
        env = {entry["name"]: entry for entry in container["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert Path(env["HF_HOME"]["value"]).parent == Path(mounts["weights"]), name
        assert env["XDG_CACHE_HOME"]["value"] == mounts["weights"], f"{name}: compiled once, too"
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", KEEPS_MODES
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True, name
        (volume,) = [v for v in pod["volumes"] if v["name"] == "weights"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_head_of_a_cluster_with_gpus_may_die() -> None:
    assert "redisAddress" in one("gpu", "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert {m["metadata"]["name"] for m in render("gpu") if m["kind"] == "StatefulSet"} == {
        "kvrelay-redis"
    }


def test_pods_with_gpus_are_on_nodes_with_gpus_and_tolerate_their_taint() -> None:
    for spec in groups("gpu").values():
        pod = spec["template"]["spec"]
        wants = "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]
        tolerated = {one["key"] for one in pod.get("tolerations", [])}
        assert ("nvidia.com/gpu" in tolerated) == wants
        assert (pod.get("nodeSelector") == {"nvidia.com/gpu.present": "true"}) == wants


@each_overlay
def test_rdma_is_for_workers_that_link_hosts(overlay: str) -> None:
    """And what the overlay gives them stays."""
    for spec in cluster_with(overlay, "rdma")["spec"]["workerGroupSpecs"]:
        (container,) = spec["template"]["spec"]["containers"]
        (before,) = groups(overlay)[spec["groupName"]]["template"]["spec"]["containers"]
        device = {"rdma/hca_shared_devices_a": "1"}
        added = device if spec["groupName"] in ("prefill", "decode") else {}
        for part in ("limits", "requests"):
            assert container["resources"][part] == before["resources"][part] | added
        capabilities = container["securityContext"]["capabilities"]
        assert capabilities.get("add", []) == (["IPC_LOCK"] if added else [])


def monitor(overlay: str) -> Manifest:
    assert "ServiceMonitor" not in {m["kind"] for m in render(overlay)}, "the operator may lack"
    watched = render_with(overlay, "prometheus-operator")
    (found,) = [m for m in watched if m["kind"] == "ServiceMonitor"]
    return found


@each_overlay
def test_prometheus_finds_the_internal_port(overlay: str, tmp_path: Path) -> None:
    router = config_of(overlay, tmp_path).router
    assert router.internal_host == "node", "Prometheus is in another pod"
    spec = monitor(overlay)["spec"]
    service = one(overlay, "Service", "kvrelay-metrics")
    assert service["spec"]["selector"] == ROUTER_PODS
    assert [p["targetPort"] for p in service["spec"]["ports"]] == [router.internal_http_port]
    template = groups(overlay)["router"]["template"]["metadata"]["annotations"]
    assert template["prometheus.io/port"] == str(router.internal_http_port)
    assert template["prometheus.io/path"] == "/metrics"
    (endpoint,) = spec["endpoints"]
    assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("overlay", [*OVERLAYS, "plain"])
def test_prometheus_reads_each_router_once(overlay: str) -> None:
    """The component's selector finds one Service, which has the port."""
    spec = monitor(overlay)["spec"]
    services = [m for m in render_with(overlay, "prometheus-operator") if m["kind"] == "Service"]
    (found,) = [m for m in services if selects(spec["selector"], m["metadata"]["labels"])]
    (port,) = [one["targetPort"] for one in found["spec"]["ports"] if one["name"] == "metrics"]
    assert (spec["endpoints"][0]["port"], port) == ("metrics", 8900)


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    assert {one["operator"] for one in selector["matchExpressions"]} == {"In"}
    expressions = selector["matchExpressions"]
    has_one_of_each = all(labels.get(one["key"]) in one["values"] for one in expressions)
    return has_one_of_each and selector["matchLabels"].items() <= labels.items()


def test_alerts_come_with_the_operator() -> None:
    assert "PrometheusRule" not in {m["kind"] for m in render("cpu")}, "the operator may lack"
    (rules,) = [
        m for m in render_with("cpu", "prometheus-operator") if m["kind"] == "PrometheusRule"
    ]
    assert rules["metadata"]["labels"]["app.kubernetes.io/name"] == "kvrelay"
    assert rules["spec"]["groups"][0]["rules"]


@each_overlay
def test_the_job_finds_its_cluster_and_its_file(overlay: str) -> None:
    cluster, job = one(overlay, "RayCluster"), one(overlay, "RayJob")["spec"]
    assert job["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert job["entrypoint"] == "kvrelay apply --yes --follow"
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert env["KVRELAY_CONFIG"] == f"{mounts['config']}/cluster.yaml"
    (volume,) = [v for v in pod["volumes"] if v["name"] == "config"]
    assert volume["configMap"]["name"] == one(overlay, "ConfigMap")["metadata"]["name"]


def pod_specs(overlay: str) -> dict[str, Manifest]:
    """# group |-> the spec of its pods"""
    head = one(overlay, "RayCluster")["spec"]["headGroupSpec"]
    every = {"head": head} | groups(overlay)
    return {name: spec["template"]["spec"] for name, spec in every.items()}


def test_every_pod_keeps_to_the_restricted_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    for overlay in OVERLAYS:
        sidecar = one(overlay, "RayCluster")["spec"]["autoscalerOptions"]["securityContext"]
        for name, pod in pod_specs(overlay).items():
            inside = pod["securityContext"]
            assert inside["runAsNonRoot"] is True and inside["runAsUser"] > 0, name
            assert inside["seccompProfile"] == {"type": "RuntimeDefault"}, name
            assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod}, name
            allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
            assert all(allowed & {*volume} for volume in pod["volumes"]), name
            for context in [sidecar, *(c["securityContext"] for c in pod["containers"])]:
                assert context["allowPrivilegeEscalation"] is False, name
                assert context["capabilities"] == {"drop": ["ALL"]}, name


@each_overlay
def test_ray_asks_for_a_token(overlay: str) -> None:
    assert one(overlay, "RayCluster")["spec"]["authOptions"] == {"mode": "token"}


@each_overlay
def test_token_and_key_come_from_a_secret_of_the_heads(overlay: str, tmp_path: Path) -> None:
    network = config_of(overlay, tmp_path).network
    pods = pod_specs(overlay)
    (volume,) = [v for v in pods["head"]["volumes"] if "secret" in v]
    (container,) = pods["head"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    folder = mounts[volume["name"]]
    assert (network.token_file, network.key_file) == (f"{folder}/token", f"{folder}/key")
    assert volume["secret"]["defaultMode"] & 0o037 == 0, "else kvrelay refuses them"
    assert pods["head"]["securityContext"]["fsGroup"], "else it may not read them"
    others = [spec for name, spec in pods.items() if name != "head"]
    assert not [v for spec in others for v in spec["volumes"] if "secret" in v]
    (endpoint,) = monitor(overlay)["spec"]["endpoints"]
    shown = endpoint["authorization"]["credentials"]
    assert shown == {"name": volume["secret"]["secretName"], "key": "token"}
    assert "Secret" not in {m["kind"] for m in render(overlay)}, "it is nobody's to commit"


@each_overlay
def test_from_elsewhere_only_public_ports_metrics_and_the_dashboard(
    overlay: str, tmp_path: Path
) -> None:
    router = config_of(overlay, tmp_path).router
    inside = one(overlay, "NetworkPolicy", "kvrelay")["spec"]
    ours = {"matchLabels": {"ray.io/cluster": "kvrelay"}}
    assert inside["podSelector"] == ours
    assert inside["ingress"] == [{"from": [{"podSelector": ours}]}]
    named = {n: one(overlay, "NetworkPolicy", n) for n in ("kvrelay-routers", "kvrelay-head")}
    open_ports = {
        name: {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        for name, policy in named.items()
    }
    assert open_ports == {
        "kvrelay-routers": {router.http_port, router.grpc_port, router.internal_http_port},
        "kvrelay-head": {8265},
    }
    assert named["kvrelay-routers"]["spec"]["podSelector"] == {"matchLabels": ROUTER_PODS}


def test_code_comes_after_what_it_needs() -> None:
    """So that a change of the code alone builds in seconds."""
    text = (DEPLOY / "Dockerfile").read_text()
    for target in ("cpu", "cuda"):
        stage = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert stage.index("requirements.txt") < stage.index("COPY --from=source / ./")
        code = stage.index("pip install --no-deps --no-build-isolation .")
        assert stage.index("COPY --from=source / ./") < code
    assert "project['optional-dependencies']['nixl']" in text, "pods hand over by it"


def test_images_run_as_an_ordinary_user() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for target in ("cpu", "cuda"):
        stage = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert stage.strip().splitlines()[-1] == "USER 1000:1000", target


def test_dockerfile_copies_what_exists_and_ends_in_serve() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.startswith("COPY") and "--" not in line]
    copied = [line.split()[1:-1] for line in lines]
    for name in (name for names in copied for name in names):
        assert (DEPLOY.parent / name).exists(), name
    stages = ["source", "base", "cpu", "cuda"]
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, re.M) == stages
    assert 'ENTRYPOINT ["kvrelay"]\nCMD ["serve"]' in text
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
    assert all(f"!{name}\n" in ignored for names in copied for name in names)


@each_overlay
def test_a_pod_that_ends_has_the_time_in_which_others_replace_it(overlay: str) -> None:
    """Ray drains the node for so long, and ends before the pod is killed."""
    for spec in groups(overlay).values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        drain_s = int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 60 <= drain_s < pod["terminationGracePeriodSeconds"]
