"""Starts a Ray of our own, or joins one that runs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cluster.config.schema import Config
from cluster.core.resolve import Site
from cluster.process.net import split_address
from cluster.process.site import local_site, site_with_gpus
from kvrelay.errors import ConfigError

CONNECT_S = 5.0
NO_RAY = (
    "no Ray runs on this machine: kvrelay serve starts a cluster, --ray-address or RAY_ADDRESS "
    "names that of another machine, kvrelay status --address HOST:PORT asks a router without Ray"
)
OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray accepts: no KV and no token goes through its object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """`own`: this process started Ray, and Ray ends with it."""

    own: bool
    site: Site

    @property
    def address(self) -> str:
        """HOST:PORT for other commands that join this Ray."""
        return str(_import_ray().get_runtime_context().gcs_address)


def ray_address(configured: str | None) -> str | None:
    """The Ray to join: as configured, else RAY_ADDRESS; None: start one.

    Raises ConfigError for an address that isn't that of Ray's control service.
    """
    address = configured or os.environ.get("RAY_ADDRESS")
    if address == "local" or not address:
        return None
    if "://" in address:
        raise ConfigError(
            f"Ray at {address}: expected HOST:PORT of its head or auto; "
            "for http:// use ray job submit --address"
        )
    return address


@contextmanager
def connected(config: Config, *, log_to_driver: bool) -> Iterator[Connected]:
    """A connection to Ray for as long as the context lasts. Raises ConfigError without one."""
    ray = _import_ray()
    address = ray_address(config.ray.address)
    if address is None:
        _start_own(config, log_to_driver)
        here = Connected(own=True, site=_own_site())
    else:
        _join(address, log_to_driver=log_to_driver)
        here = Connected(own=False, site=_joined_site())
    try:
        yield here
    finally:
        ray.shutdown()


@contextmanager
def joined(address: str) -> Iterator[None]:
    """A connection to a running Ray. Raises ConfigError when there is none."""
    _join(address, log_to_driver=False)
    try:
        yield
    finally:
        _import_ray().shutdown()


def _join(address: str, *, log_to_driver: bool) -> None:
    ray = _import_ray()
    if ray_address(None) is None:
        os.environ.pop("RAY_ADDRESS", None)  # "" and "local" name no Ray; Ray would look there
    named = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    _check_answers(named)
    try:
        ray.init(
            address=address, log_to_driver=log_to_driver, logging_level="ERROR", namespace="kvrelay"
        )
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if named == "auto" and isinstance(error, ConnectionError):
            raise ConfigError(NO_RAY) from None
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"Ray at {address}: can't connect: {reason}") from None


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes and print pages of warnings."""
    if address == "auto":
        return
    try:
        socket.create_connection(split_address(address, "Ray at"), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"Ray at {address}: can't connect: {error}") from None


def _start_own(config: Config, log_to_driver: bool) -> None:
    """Declares resources for every worker, whatever the machine has: kvrelay shares them out
    itself."""
    ray = _import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers on CPUs give way by themselves
    workers = sum(pool.replicas.max for pool in config.workers)
    with _children_ignore_sigterm():
        ray.init(
            address="local",
            num_cpus=max(workers, local_site().node_cpus),
            resources=_custom_resources(config),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=log_to_driver,
            logging_level="ERROR",
            namespace="kvrelay",
        )


@contextmanager
def _children_ignore_sigterm() -> Iterator[None]:
    """A signal to our whole process group must reach only us: we drain before Ray ends.

    Ray does the same for SIGINT. Its processes inherit the mask; Ray kills those that don't
    terminate.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _custom_resources(config: Config) -> dict[str, float]:
    """On a Ray of our own this machine stands for every node, so it offers each named resource."""
    named: dict[str, float] = {}
    for pool in config.workers:
        for name, amount in pool.resources.items():
            named[name] = named.get(name, 0.0) + amount * pool.replicas.max
    others = [config.router.resources] * config.router.replicas
    others += [config.pool.resources] if config.pool.enabled != "off" else []
    for resources in others:
        for name, amount in resources.items():
            named[name] = named.get(name, 0.0) + amount
    return {name: amount for name, amount in named.items() if name not in ("CPU", "GPU", "memory")}


def site_of(*, own: bool) -> Site:
    """Of the Ray that was joined; `own`: a cluster's own."""
    return _own_site() if own else _joined_site()


def _own_site() -> Site:
    """The GPUs that both PyTorch and Ray find."""
    site = site_with_gpus()
    seen = _import_ray().cluster_resources().get("GPU", 0.0) if site.gpus else 0.0
    return replace(site, gpus=min(site.gpus, seen))


def _joined_site() -> Site:
    """The sum over all nodes; each worker listens on its own node's address."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    cpus = [node["Resources"].get("CPU", 0.0) for node in nodes]
    return replace(
        local_site(),
        total_cpus=sum(cpus),
        node_cpus=max(1, int(max(cpus, default=1))),
        gpus=sum(node.get("GPU", 0.0) for node in nodes),
        host=None,
        spans_hosts=len({node["NodeManagerAddress"] for node in nodes}) > 1,
    )


def _import_ray():  # type: ignore[no-untyped-def]
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray isn't installed: pip install 'ray[default]', or run kvrelay router and "
            "kvrelay worker as plain processes"
        ) from None
    return ray
