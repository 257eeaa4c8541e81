"""Two versions of kvrelay that don't understand each other, side by side: each router uses the
workers of its own, so one replaces the other while clients ask. Nothing fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tests.integration.plain_kit as kit
from kvrelay import Client
from kvrelay.types import WIRE_VERSION
from tests.integration.plain_kit import RouterAddresses, start_router, start_worker
from tests.integration.plain_kit import here as here
from tests.integration.ray_head import Marked, until
from tests.integration.test_apply_ray import Askers

NEXT = f"""#!{sys.executable}
import kvrelay.types
kvrelay.types.WIRE_VERSION += 1
from cluster.cli.main import main
main()
"""
Process = subprocess.Popen[bytes]


def names(router: RouterAddresses) -> list[str]:
    with Client(router.grpc, timeout_s=30) as client:
        return [worker.name for worker in client.server_info().workers]


def leave(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_the_next_version_replaces_this_one(
    here: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = tmp_path / "kvrelay"
    following.write_text(NEXT)
    following.chmod(0o755)
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()

    router, address = start_router(here, old / "router", "--set=router.lame_duck=1s")
    worker = start_worker(here, [address], "both", old / "worker", "--name=old")
    until(lambda: names(address) == ["old"])

    monkeypatch.setattr(kit, "KVRELAY", following)
    next_router, next_address = start_router(here, new / "router")
    said = f"this worker speaks wire version {WIRE_VERSION + 1}, the router {WIRE_VERSION}"
    askers = Askers([address.grpc, next_address.grpc])
    with askers.asking():
        askers.more()
        next_worker = start_worker(
            here, [address, next_address], "both", new / "worker", "--name=new"
        )
        until(lambda: names(next_address) == ["new"])
        until(lambda: said in (old / "router").read_text())
        assert names(address) == ["old"], "it is not used by the other version"
        askers.more()
        leave(router)
        leave(worker)
        askers.more()
    assert not askers.errors
    assert len(askers.answers) == 1
    leave(next_router)
    leave(next_worker)
