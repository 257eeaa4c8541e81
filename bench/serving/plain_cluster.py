"""Routers and workers as ordinary processes, each on the cores that the benchmark gives it."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.access import HEADERS

PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """`cores` are where it runs; on a CPU it computes with one thread on each."""

    role: str
    cores: tuple[int, ...]
    device: str = "cpu"
    nice: int = 0


@dataclass(slots=True, kw_only=True)
class PlainCluster:
    """`http_ports`, `metrics_ports`: of each router; `grpc_port`, `internal_grpc`: of the first"""

    http_ports: list[int]
    grpc_port: int
    metrics_ports: list[int]
    internal_grpc: str
    processes: dict[str, psutil.Process] = field(default_factory=dict)

    @property
    def http_port(self) -> int:
        """Of the first router."""
        return self.http_ports[0]

    def resident_mib(self) -> dict[str, float]:
        return {name: p.memory_info().rss / 2**20 for name, p in self.processes.items()}

    def cpu_s(self) -> float:
        """What all its processes have computed so far."""
        times = [process.cpu_times() for process in self.processes.values() if process.is_running()]
        return sum(one.user + one.system for one in times)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or those with this one, as the first router says."""
        pattern = rf"^{re.escape(name)}(?:\{{[^}}]*{re.escape(label)}[^}}]*\}})? (\S+)$"
        text = _metrics(self.metrics_ports[0])
        return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))

    def histogram(self, name: str) -> dict[float, float]:
        """# upper bound |-> how many were not above it, at all routers"""
        pattern = rf'^{re.escape(name)}_bucket\{{.*le="([^"]+)".*\}} (\S+)$'
        counts: Counter[float] = Counter()
        for port in self.metrics_ports:
            for bound, count in re.findall(pattern, _metrics(port), re.MULTILINE):
                counts[float(bound)] += int(float(count))
        return {bound: float(count) for bound, count in counts.items()}


def _metrics(port: int) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=HEADERS)
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


@contextmanager
def plain_cluster(
    model: Path,
    plans: Sequence[WorkerPlan],
    settings: Sequence[str],
    *,
    pool: str | None = None,
    router_settings: Sequence[str] = (),
    router_cores: Sequence[int] | None = None,
    routers: int = 1,
    each_router: Sequence[Sequence[str]] = (),
) -> Iterator[PlainCluster]:
    """Ready to serve; everything is stopped at the end. `settings` are the workers' KEY=VALUE,
    `pool` names the pool node that they use. `each_router`: further settings of one router each."""
    with ExitStack() as stack:
        extra = [f"--set={setting}" for setting in settings]
        extra += [] if pool is None else [f"--pool={pool}"]
        own = [f"--set={setting}" for setting in router_settings]
        begin = ["router", "--model", str(model), *_ROUTER, *own]
        further = [[f"--set={setting}" for setting in one] for one in each_router or [()] * routers]
        started = [stack.enter_context(_process([*begin, *one], router_cores)) for one in further]
        ports = [_ports(router) for router in started]
        cluster = PlainCluster(
            http_ports=[one["HTTP"] for one in ports],
            grpc_port=ports[0]["gRPC"],
            metrics_ports=[one["internal HTTP"] for one in ports],
            internal_grpc=f"127.0.0.1:{ports[0]['internal gRPC']}",
        )
        for number, router in enumerate(started):
            name = "router" if len(started) == 1 else f"router-{number}"
            cluster.processes[name] = psutil.Process(router.pid)
        for number, plan in enumerate(plans):
            name = f"{plan.role}-{number}"
            command = [
                "worker",
                *(f"--join=127.0.0.1:{one['internal gRPC']}" for one in ports),
                f"--role={plan.role}",
                f"--device={plan.device}",
                f"--model={model}",
                f"--name={name}",
                f"--cpu-threads={len(plan.cores)}",
                f"--device-share={len(plans)}",
                *extra,
            ]
            worker = stack.enter_context(_process(command, plan.cores, nice=plan.nice))
            cluster.processes[name] = psutil.Process(worker.pid)
        for port, own_settings in zip(cluster.http_ports, further, strict=True):
            _wait_ready(port, has_tls=any(TLS in one for one in own_settings))
        yield cluster


@contextmanager
def pool_node(name: str) -> Iterator[psutil.Process]:
    """A pool node of that cluster name on this host."""
    with _process(["pool-node", "--name", name, "--host-memory", "1GiB"]) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the pool node did not start")
        yield psutil.Process(process.pid)


TLS = "network.tls.public"
HANDED_OVER = ("router.placement.local_prefill=off",)
"""Router settings of what measures handoffs."""
_ROUTER = [
    *("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0"),
    "--set=router.lame_duck=null",
]


@contextmanager
def _process(
    arguments: Sequence[str], cores: Sequence[int] | None = None, *, nice: int = 0
) -> Iterator[subprocess.Popen[str]]:
    pin = [] if cores is None else ["taskset", "-c", ",".join(map(str, cores))]
    environment = {**os.environ, "KVRELAY_LOG": "warning", "PYTHONUNBUFFERED": "1"}
    if cores is not None:
        environment["OMP_NUM_THREADS"] = str(len(cores))
    process = subprocess.Popen(
        [*pin, "nice", f"-n{nice}", sys.executable, "-m", "cluster", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        if process.stdout is not None:
            process.stdout.close()


def _ports(router: subprocess.Popen[str]) -> dict[str, int]:
    """The router prints one line per face: `HTTP on HOST:PORT`."""
    assert router.stdout is not None
    ports = {}
    while len(ports) < 4:
        line = router.stdout.readline()
        if not line:
            raise RuntimeError("the router did not start")
        face, _, address = line.strip().partition(" on ")
        found = re.search(r":(\d+)(?:[ ,]|$)", address)
        assert found is not None, line
        ports[face] = int(found[1])
    return ports


def _wait_ready(http_port: int, *, has_tls: bool) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_ready(http_port, has_tls=has_tls):
        if time.monotonic() > deadline_s:
            raise RuntimeError("the cluster did not become ready")
        time.sleep(0.05)


def is_ready(http_port: int, *, has_tls: bool = False) -> bool:
    """Whose certificate it is doesn't matter here."""
    url = f"{'https' if has_tls else 'http'}://127.0.0.1:{http_port}/ready"
    unchecked = ssl._create_unverified_context() if has_tls else None
    try:
        with urllib.request.urlopen(url, context=unchecked) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
