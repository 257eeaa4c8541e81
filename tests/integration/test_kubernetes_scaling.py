"""Who says how many pods of the manifests without Ray there are: KEDA, or an HPA. Roles are the
controller's, beside either: tests/unit/test_two_owners.py shows that they don't fight."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from router.live.metrics import RouterMetrics
from tests.integration.manifests import Manifest, one, render_with
from tests.integration.test_kubernetes import KUBERNETES_VERSION
from tests.unit.fake_dispatcher import FakeDispatcher
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_promql import by_the_adapter

KINDS = {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler"}

each_way = pytest.mark.parametrize("way", KINDS)
each_pool = pytest.mark.parametrize("pool", ["kvrelay-prefill", "kvrelay-decode"])


def closed(**properties: Any) -> dict[str, Any]:
    return {"properties": properties, "additionalProperties": False, "required": [*properties]}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
SCALED_OBJECT = closed(
    scaleTargetRef=closed(name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    advanced=closed(
        horizontalPodAutoscalerConfig=closed(
            behavior=closed(scaleDown=closed(stabilizationWindowSeconds=COUNT))
        )
    ),
    triggers={
        "type": "array",
        "items": closed(
            type={"const": "prometheus"},
            metadata=closed(serverAddress=TEXT, query=TEXT, threshold=TEXT),
        ),
    },
)
"""Of keda.sh/v1alpha1, what is used here: all of a trigger's metadata are strings."""


def made(way: str, kind: str, name: str, *beside: str) -> Manifest:
    rendered = render_with("plain", way, *beside)
    (found,) = [m for m in rendered if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def bounds(way: str, pool: str) -> tuple[int, int, float]:
    """Least and most pods, and what one of them is for."""
    spec = made(way, KINDS[way], pool)["spec"]
    if way == "keda":
        (trigger,) = spec["triggers"]
        per_pod = float(trigger["metadata"]["threshold"])
        return spec["minReplicaCount"], spec["maxReplicaCount"], per_pod
    (metric,) = spec["metrics"]
    per_pod = int(metric["external"]["target"]["averageValue"].removesuffix("m")) / 1000
    return spec["minReplicas"], spec["maxReplicas"], per_pod


def query(way: str, pool: str) -> str:
    """What Prometheus is asked."""
    spec = made(way, KINDS[way], pool)["spec"]
    if way == "keda":
        return str(spec["triggers"][0]["metadata"]["query"])
    return by_the_adapter(spec["metrics"][0]["external"]["metric"])


def told_by_routers() -> set[str]:
    """The names of all metrics of a router that has workers."""
    snapshot = FakeDispatcher().snapshot()
    text = RouterMetrics("m").exposition(snapshot).decode()
    return set(re.findall(r"^([a-z_:]+)\{", text, re.MULTILINE))


@each_way
@each_pool
def test_pods_follow_what_is_offered_to_their_pool(way: str, pool: str) -> None:
    assert made(way, KINDS[way], pool)["spec"]["scaleTargetRef"]["name"] == pool
    asked = re.fullmatch(r'sum\((\S+)\{pool="([\w-]+)"\}\)', query(way, pool))
    assert asked is not None
    assert asked[1] in told_by_routers()
    (container,) = one("plain", "Deployment", pool)["spec"]["template"]["spec"]["containers"]
    assert f"--worker-pool={asked[2]}" in container["args"]
    assert bounds(way, pool) == (2, 8, 0.9), "nothing is there once only"


@each_way
@each_pool
def test_an_apply_does_not_count_the_pods_again(way: str, pool: str) -> None:
    assert "replicas" in one("plain", "Deployment", pool)["spec"]
    deployment = made(way, "Deployment", pool)
    assert "replicas" not in deployment["spec"], "they have an owner"
    kubernetes_validate.validate(deployment, KUBERNETES_VERSION, strict=True)
    assert made(way, "Deployment", "kvrelay-router")["spec"]["replicas"] == 2


@each_way
@each_pool
def test_roles_may_follow_beside_it(way: str, pool: str) -> None:
    assert made(way, KINDS[way], pool, "roles") == made(way, KINDS[way], pool)
    assert made(way, "Deployment", "kvrelay-controller", "roles")["spec"]["replicas"] == 1


@each_pool
def test_kubernetes_accepts_the_hpa(pool: str) -> None:
    hpa = made("hpa", KINDS["hpa"], pool)
    kubernetes_validate.validate(hpa, KUBERNETES_VERSION, strict=True)


@each_pool
def test_keda_accepts_the_scaled_object(pool: str) -> None:
    scaled = made("keda", KINDS["keda"], pool)
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    jsonschema.validate(scaled["spec"], SCALED_OBJECT)


def test_the_pages_hpa_by_saturation_is_one() -> None:
    text = (REPOSITORY / "docs" / "deploy-kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (hpa,) = [found for found in map(yaml.safe_load, blocks) if found["kind"] == KINDS["hpa"]]
    kubernetes_validate.validate(hpa, KUBERNETES_VERSION, strict=True)
    (metric,) = hpa["spec"]["metrics"]
    asked = re.fullmatch(
        r'sum\((\S+)\{role="(\w+)"\}\)', by_the_adapter(metric["external"]["metric"])
    )
    assert asked is not None and asked[1] in told_by_routers()
    assert hpa["spec"]["scaleTargetRef"]["name"] == f"kvrelay-{asked[2]}"
    assert metric["external"]["target"]["type"] == "Value", "a ratio, times the pods that there are"
