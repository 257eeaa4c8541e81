"""What KubeRay's operator makes of a RayCluster: the commands and the environment of Ray's pods.

As in its releases since 1.4. What it adds for the dashboard's view of the disk, for TLS and for
accelerators other than GPUs is left out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.integration.manifests import Manifest
from tests.integration.ray_head import Environment, Marked, until

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
ULIMIT = "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
TAKE_A_VALUE = ("log-color", "include-dashboard", "include-log-monitor")
"""Of `ray start`, those whose value may be true or false; others of this kind stand alone."""


def group_of(cluster: Manifest, name: str) -> Manifest:
    """`head` is the head's."""
    spec = cluster["spec"]
    if name == "head":
        return dict(spec["headGroupSpec"])
    (found,) = [one for one in spec["workerGroupSpecs"] if one["groupName"] == name]
    return dict(found)


def container_of(group: Manifest) -> Manifest:
    """Ray's own is the first."""
    return dict(group["template"]["spec"]["containers"][0])


def command(cluster: Manifest, name: str, changes: Mapping[str, str | None]) -> list[str]:
    """Of the pods of this group. `changes`: # option of `ray start` |-> its value on this machine,
    None: without it."""
    params = start_params(cluster, name) | dict(changes)
    options = [option(key, value) for key, value in sorted(params.items()) if value is not None]
    ray = " ".join(["ray start", *(["--head"] if name == "head" else []), *filter(None, options)])
    return ["/bin/bash", "-c", "--", f"{ULIMIT}; {ray}"]


def start_params(cluster: Manifest, name: str) -> dict[str, str]:
    group = group_of(cluster, name)
    service = f"{cluster['metadata']['name']}-head-svc:6379"
    scales = cluster["spec"].get("enableInTreeAutoscaling", False)
    only = {"address": service}
    if name == "head":
        only = {"dashboard-host": "0.0.0.0"} | ({"no-monitor": "true"} if scales else {})
    everywhere = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    sizes = container_sizes(container_of(group))
    return {**only, **everywhere, **sizes, **group["rayStartParams"], "block": "true"}


def container_sizes(container: Manifest) -> dict[str, str]:
    limits = container["resources"].get("limits", {})
    cpus = limits.get("cpu", container["resources"].get("requests", {}).get("cpu"))
    return {
        **({"num-cpus": cpus} if cpus else {}),
        **({"memory": str(bytes_of(limits["memory"]))} if "memory" in limits else {}),
        **({"num-gpus": limits["nvidia.com/gpu"]} if "nvidia.com/gpu" in limits else {}),
    }


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def option(key: str, value: str) -> str:
    if value in ("true", "false") and key not in TAKE_A_VALUE:
        return f"--{key}" if value == "true" else ""
    return f"--{key}={value}"


def environment(cluster: Manifest, name: str, pod: str) -> Environment:
    """Values of the manifest itself, and what the operator adds for Ray's autoscaler."""
    given = container_of(group_of(cluster, name)).get("env", [])
    own = {one["name"]: one["value"] for one in given if "value" in one}
    version = cluster["spec"].get("autoscalerOptions", {}).get("version")
    switch = {"RAY_enable_autoscaler_v2": str(version == "v2").lower()} if version else {}
    return {
        **own,
        **(switch if name == "head" else {}),
        "RAY_CLOUD_INSTANCE_ID": pod,
        "RAY_NODE_TYPE_NAME": "headgroup" if name == "head" else name,
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
    }


@contextmanager
def pod(here: Marked, command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Its process, which gets the kubelet's signals, once its node is there. It is killed in the
    end."""
    process = here.start(*command, log=log)
    try:
        until(lambda: "will now block" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.kill()
        process.wait()
