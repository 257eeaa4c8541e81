"""A worker whose host has not got the model fetches it from a worker that serves it. Each has a
cache of its own, as on two hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hub import COMMIT, HUB_ID, Hub, contents_of, hub_of
from tests.integration.plain_kit import (
    Process,
    RouterAddresses,
    generate,
    start_router,
    start_worker,
    workers_of,
)
from tests.integration.plain_kit import here as here
from tests.integration.ray_head import NOTHING_BUILT, Marked, ray_head, until
from tests.integration.test_apply_ray import names
from tests.integration.test_serve_ray import KVRELAY, addresses, assert_nothing_is_left
from tests.models import random_checkpoint

MODEL = ("--set", f"model.path={HUB_ID}")


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    """With a file that no engine needs."""
    return contents_of(random_checkpoint(tmp_path / "model")) | {"README.md": b"for people"}


def end(*processes: Process) -> None:
    for process in processes:
        process.terminate()
        assert process.wait(60) == 0


def on_host(here: Marked, hub: Hub, home: Path) -> Marked:
    return replace(here, env=here.env | hub.environment(home))


def until_there(router: RouterAddresses, process: Process, log: Path) -> None:
    until(lambda: workers_of(router) == {"both"} or process.poll() is not None)
    assert process.poll() is None, log.read_text()


@pytest.fixture
def first(
    here: Marked, contents: dict[str, bytes], tmp_path: Path
) -> Iterator[tuple[Hub, RouterAddresses, Process]]:
    """A router and a worker that have the model from the hub, which is down from then on."""
    with hub_of(contents) as hub:
        host = on_host(here, hub, tmp_path / "one")
        serving, router = start_router(host, tmp_path / "r", *MODEL)
        log = tmp_path / "w1"
        worker = start_worker(host, [router], "both", log, *MODEL, *NOTHING_BUILT)
        until_there(router, worker, log)
    yield hub, router, worker
    end(serving)


def test_the_second_worker_starts_with_the_hub_down(
    here: Marked, first: tuple[Hub, RouterAddresses, Process], tmp_path: Path
) -> None:
    """Its tokens are those of the first, and the hub's own client finds its files."""
    hub, router, worker = first
    assert "README.md" not in hub.given
    expected = generate(router)
    log, host = tmp_path / "w2", on_host(here, hub, tmp_path / "two")
    second = start_worker(host, [router], "both", log, *MODEL, *NOTHING_BUILT)
    until(lambda: "serves after" in log.read_text() or second.poll() is not None)
    told = log.read_text()
    assert second.poll() is None, told
    assert re.search(r"the model from the worker at \S+: \d+ files, 0\.\d+ of 0\.\d+ GB in", told)
    end(worker)
    until_there(router, second, log)
    assert generate(router) == expected
    end(second)
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "one")
    assert not list(tmp_path.rglob("*.incomplete"))
    alone = start_worker(host, [router], "both", tmp_path / "w3", *MODEL, *NOTHING_BUILT)
    until_there(router, alone, tmp_path / "w3")
    assert generate(router) == expected
    assert "the model from the worker" not in (tmp_path / "w3").read_text()
    end(alone)


def snapshot(home: Path) -> dict[str, tuple[str, bytes]]:
    """# file |-> where its link leads, its content"""
    (folder,) = home.glob(f"hub/models--*/snapshots/{COMMIT}")
    assert (folder.parents[1] / "refs" / "main").read_text() == COMMIT
    links = {path.name: str(path.readlink()) for path in folder.iterdir()}
    return {name: (link, (folder / name).read_bytes()) for name, link in links.items()}


FILE = f"""
name: peers
model: {{path: {HUB_ID}, dtype: float32}}
router: {{http_port: 0, grpc_port: 0}}
pool: {{enabled: "off"}}
engine: {{compile: "off", profile: "off", kv_memory: 16MiB}}
attention: {{backend: sdpa}}
workers:
  - {{role: both, cpu_threads: 1, resources: {{CPU: 0.25}}}}
"""


@pytest.mark.ray
def test_on_ray_a_worker_asks_those_that_its_controller_knows(
    contents: dict[str, bytes], tmp_path: Path
) -> None:
    """Both are on one host, where the revision is forgotten: alone, the second one would need the
    hub, which is down."""
    log, file, home = tmp_path / "log", tmp_path / "c.yaml", tmp_path / "home"
    file.write_text(FILE)
    with ExitStack() as up:
        hub = up.enter_context(hub_of(contents))
        with ray_head({}, **hub.environment(home)) as head:
            here = head.joined()
            driver = here.start(KVRELAY, "apply", file, "--yes", "--follow", log=log)
            http, grpc = addresses(driver, log)
            up.close()
            (ref,) = home.glob("hub/models--*/refs/main")
            ref.unlink()
            here.run(KVRELAY, "scale", "both=2")
            until(lambda: "both-1 serves on" in log.read_text())
            assert ref.read_text() == COMMIT
            assert "both-1 is lost" not in log.read_text()
            assert names(head) == ["router-0", "both-0", "both-1"]
            driver.terminate()
            driver.wait()
            here.run(KVRELAY, "stop")
            assert_nothing_is_left(head.marked, http, grpc)
