"""A cluster with API keys, mutual TLS within and TLS without, of real processes; and what its disk
tier keeps for whom when all of them have been started again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from cluster.cli.status import kv
from kvrelay import Client, Generated, Tls
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError
from tests.access import TOKEN
from tests.integration.plain_kit import KVRELAY, Process, RouterAddresses, start_router
from tests.integration.plain_kit import here as here
from tests.integration.ray_head import Marked, until
from tests.integration.tls_kit import Authority

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form."


class Guarded:
    """The options of its processes, and how to call it."""

    def __init__(self, here: Marked, folder: Path) -> None:
        self.here, self.folder = here, folder
        self.pool = f"guarded-{uuid4().hex[:8]}"
        self.inside, self.outside = Authority(folder, "inside"), Authority(folder, "outside")
        shown, served = self.inside.pair("process"), self.outside.pair("router")
        internal = {"ca": self.inside.ca, "client_ca": self.inside.ca}
        internal |= {"certificate": shown.certificate, "key": shown.key}
        public = {"certificate": served.certificate, "key": served.key}
        self.within = _set("network.tls.internal", internal)
        self.at_router = (*self.within, *_set("network.tls.public", public))
        self.key = str(folder / "cluster.key")
        self.at_router += _set("router", {"api_keys": str(folder / "keys.json")})
        self.at_router += _set("network", {"key_file": self.key})
        self.access = Access(token=TOKEN, dials=self.inside.dials("operator"))

    def add_key(self, tenant: str) -> str:
        file = str(self.folder / "keys.json")
        told = self.here.run(
            KVRELAY, "keys", "add", "--file", file, "--tenant", tenant, "--format", "json"
        )
        return str(json.loads(told)["key"])

    def joined(self, router: RouterAddresses) -> tuple[int, int]:
        """Workers and pool nodes."""
        found = kv.of_router(router.internal, self.access)
        return len(found.workers), len(found.pool_nodes)

    def ask(self, router: RouterAddresses, key: str) -> Generated:
        tls = Tls(ca=self.outside.ca)
        with Client(router.grpc, api_key=key, tls=tls, timeout_s=60) as client:
            return client.generate(TEXT, max_tokens=4, temperature=0.0)

    @contextmanager
    def running(self, life: str) -> Iterator[RouterAddresses]:
        """All of them, until all have ended by themselves."""
        router, address = start_router(self.here, self.folder / f"{life}-router", *self.at_router)
        node, worker = self._node(address, life), self._worker(address, life, self.within)
        until(lambda: self.joined(address) == (1, 1))
        until(lambda: " joined (" in (self.folder / f"{life}-node").read_text())
        yield address
        _end([router, node, worker])

    def _node(self, router: RouterAddresses, life: str) -> Process:
        disk = ("--disk", str(self.folder / "disk"), "--disk-size", "64MiB")
        options = ("--name", self.pool, "--join", router.internal, "--host-memory", "64MiB")
        log = self.folder / f"{life}-node"
        return self.here.start(KVRELAY, "pool-node", *options, *disk, *self.within, log=log)

    def _worker(self, router: RouterAddresses, name: str, tls: Sequence[str]) -> Process:
        options = ("--role", "both", "--cpu-threads", "1", "--pool", self.pool)
        small = ("--set", "engine.kv_memory=16MiB", "--set", "model.dtype=float32")
        join = ("--join", router.internal, *options, *small, *tls)
        return self.here.start(KVRELAY, "worker", *join, log=self.folder / f"{name}-worker")

    def stranger(self, router: RouterAddresses) -> Process:
        """It has the token, and a certificate of an authority of its own."""
        strange = Authority(self.folder, "strange").pair("process")
        shown = {"ca": self.inside.ca, "certificate": strange.certificate, "key": strange.key}
        return self._worker(router, "stranger", _set("network.tls.internal", shown))


def _set(section: str, keys: Mapping[str, str]) -> tuple[str, ...]:
    given = (f"{section}.{key}={value}" for key, value in keys.items())
    return tuple(part for one in given for part in ("--set", one))


def _end(processes: Sequence[Process]) -> None:
    for process in reversed(processes):
        process.terminate()
        assert process.wait(60) == 0


def test_all_processes_speak_tls_and_only_those_of_the_cluster_are_heard(
    here: Marked, tmp_path: Path
) -> None:
    cluster = Guarded(here, tmp_path)
    key = cluster.add_key("a")
    with cluster.running("first") as router:
        assert cluster.ask(router, key).completion_tokens
        with pytest.raises(ConfigError):
            kv.of_router(router.internal, Access(token=TOKEN, dials=cluster.inside.dials()))
        stranger = cluster.stranger(router)
        until(lambda: "trying again until" in (tmp_path / "stranger-worker").read_text())
        assert cluster.joined(router) == (1, 1)
        stranger.terminate()
        stranger.wait(60)


def test_the_disk_tier_is_each_tenants_own_after_a_restart_until_the_key_is_rotated(
    here: Marked, tmp_path: Path
) -> None:
    cluster = Guarded(here, tmp_path)
    a, b = cluster.add_key("a"), cluster.add_key("b")
    with cluster.running("first") as router:
        first = cluster.ask(router, a)
        assert first.cached_tokens == 0
    with cluster.running("second") as router:
        assert cluster.ask(router, b).cached_tokens == 0
        again = cluster.ask(router, a)
        assert again.cached_tokens > 0
        assert again.choices == first.choices
    here.run(KVRELAY, "rotate-key", "--yes", "--key-file", cluster.key)
    with cluster.running("third") as router:
        assert cluster.ask(router, a).cached_tokens == 0
