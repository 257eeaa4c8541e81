"""Kubernetes manifests as `kubectl apply -k` would send them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = ("cpu", "gpu")

Manifest = dict[str, Any]


@cache
def render(overlay: str) -> tuple[Manifest, ...]:
    return built(DEPLOY / "kubernetes" / "overlays" / overlay)


def built(folder: Path) -> tuple[Manifest, ...]:
    """Skips the test without kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: nothing renders the manifests")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


@cache
def render_with(overlay: str, *components: str) -> tuple[Manifest, ...]:
    """The overlay with more of `components`, as a user's own overlay would name them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.relpath(DEPLOY / "kubernetes", Path(name).resolve()))
        parts = {
            "resources": [str(folder / "overlays" / overlay)],
            "components": [str(folder / "components" / name) for name in components],
        }
        Path(name, "kustomization.yaml").write_text(yaml.safe_dump(parts))
        return built(Path(name))


def one(overlay: str, kind: str, name: str | None = None) -> Manifest:
    """The only manifest of this kind (and name)."""
    named = [m for m in render(overlay) if m["kind"] == kind]
    (found,) = [m for m in named if name is None or m["metadata"]["name"] == name]
    return found


def groups(overlay: str) -> dict[str, Manifest]:
    """# worker group |-> its spec"""
    specs = one(overlay, "RayCluster")["spec"]["workerGroupSpecs"]
    return {spec["groupName"]: spec for spec in specs}


def cluster_file(overlay: str) -> str:
    return str(one(overlay, "ConfigMap")["data"]["cluster.yaml"])


def base_cluster() -> Manifest:
    """The RayCluster as the base has it, without kubectl."""
    text = (DEPLOY / "kubernetes" / "base" / "raycluster.yaml").read_text()
    return dict(yaml.safe_load(text))


def base_groups() -> list[Manifest]:
    """The worker groups of the base."""
    specs: list[Manifest] = base_cluster()["spec"]["workerGroupSpecs"]
    return specs


def redis_manifest(kind: str) -> Manifest:
    """Of the component `head-redis`, without kubectl."""
    text = (DEPLOY / "kubernetes" / "components" / "head-redis" / "redis.yaml").read_text()
    (found,) = [made for made in yaml.safe_load_all(text) if made["kind"] == kind]
    return dict(found)


def group_resources(spec: Manifest) -> dict[str, float]:
    """Custom resources of one pod, out of KubeRay's doubly quoted JSON."""
    given: str = spec["rayStartParams"].get("resources", '"{}"')
    return dict(yaml.safe_load(given.strip('"').replace('\\"', '"')))
