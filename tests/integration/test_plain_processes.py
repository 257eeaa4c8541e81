"""`kvrelay router` and `kvrelay worker --join` as ordinary processes, without Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvrelay import Client, Stream
from kvrelay.client.options import GenerateOptions
from kvrelay.errors import KvrelayError
from tests.integration.plain_kit import (
    KVRELAY,
    ROLES,
    ChunkList,
    RouterAddresses,
    generate,
    holds_nothing,
    pool_nodes_of,
    port_of,
    start_pool_node,
    start_router,
    start_worker,
    until_joined,
    workers_of,
)
from tests.integration.plain_kit import here as here
from tests.integration.ray_head import Marked, until


def test_workers_join_serve_and_join_again(here: Marked, tmp_path: Path) -> None:
    router, address = start_router(here, tmp_path / "r")
    ready = {role: tmp_path / f"{role}-ready" for role in ROLES}
    ready["prefill"].touch()  # by one that was killed
    workers = [
        start_worker(here, [address], role, tmp_path / role, f"--ready-file={ready[role]}")
        for role in ROLES
    ]
    until(lambda: not ready["prefill"].exists())
    until_joined(address)
    until(lambda: all(file.exists() for file in ready.values()))
    node = start_pool_node(here, address, tmp_path / "node")
    until(lambda: pool_nodes_of(address) == 1)
    until(lambda: (tmp_path / "node").read_text().count(" joined (") == 2)
    before = generate(address)
    assert len(before) == 12
    assert here.left_of_kvrelay(), "slabs in shared memory"

    router.terminate()
    assert router.wait(30) == 0, (tmp_path / "r").read_text()
    router, address = start_router(here, tmp_path / "r2", again=address)
    until_joined(address)
    until(lambda: pool_nodes_of(address) == 1)
    assert generate(address) == before

    node.terminate()
    assert node.wait(30) == 0, (tmp_path / "node").read_text()
    until(lambda: pool_nodes_of(address) == 0)
    workers[0].terminate()
    assert workers[0].wait(30) == 0, (tmp_path / "prefill").read_text()
    assert [ready[role].exists() for role in ROLES] == [False, True]
    until(lambda: workers_of(address) == {"decode"})
    workers[1].terminate()
    router.terminate()
    assert workers[1].wait(30) == 0, (tmp_path / "decode").read_text()
    assert router.wait(30) == 0, (tmp_path / "r2").read_text()


def _long(n: int) -> GenerateOptions:
    return {"max_tokens": 300, "ignore_eos": True, "seed": 7, "n": n}


def _asked(client: Client, n: int) -> Stream:
    """It has begun."""
    stream = client.stream("It was", **_long(n))
    next(stream)
    return stream


def test_a_killed_router_takes_along_no_stream(here: Marked, tmp_path: Path) -> None:
    """Those of clients that know another router go on there; those of the other go on anyway."""
    started = [start_router(here, tmp_path / f"r{i}") for i in range(2)]
    (doomed, doomed_at), (stays, stays_at) = started
    both = [doomed_at.grpc, stays_at.grpc]
    workers = [start_worker(here, [doomed_at, stays_at], role, tmp_path / role) for role in ROLES]
    until_joined(doomed_at)
    until_joined(stays_at)
    before = generate(stays_at)
    with Client(both, timeout_s=60) as client, Client(stays_at.grpc) as at_the_other:
        whole = [at_the_other.generate("It was", **_long(n)) for n in (1, 2)]
        other = _asked(at_the_other, 1)
        streams = [ChunkList(client.stream("It was", **_long(n))) for n in (1, 2)]
        alone = _asked(Client(doomed_at.grpc), 1)
        until(lambda: all(stream.tokens > 20 for stream in streams))
        doomed.kill()
        doomed.wait(30)
        for stream, expected in zip(streams, whole, strict=True):
            assert stream.texts() == [choice.text for choice in expected.choices]
            assert stream.ids() == [choice.token_ids for choice in expected.choices]
        assert client.generate("It was", max_tokens=12, ignore_eos=True, temperature=0.0)
        assert 1 + sum(len(chunk.token_ids) for chunk in other) == 300
    until(lambda: holds_nothing(stays_at))

    again, address = start_router(here, tmp_path / "again", again=doomed_at)
    assert address == doomed_at
    until_joined(doomed_at)
    assert sum(len(chunk.token_ids) for chunk in alone) >= 200, "its only router is back"
    assert generate(doomed_at) == before
    with Client([stays_at.grpc, doomed_at.grpc], timeout_s=60) as client:
        stream = ChunkList(client.stream("It was", **_long(1)))
        until(lambda: stream.tokens > 20)
        stays.send_signal(signal.SIGSTOP)
        assert stream.ids() == [whole[0].token_ids], "a router that is silent is left"
        stays.send_signal(signal.SIGCONT)
    for process in (stays, again, *workers):
        process.terminate()
    assert [process.wait(30) for process in (stays, again, *workers)] == [0] * 4


def test_a_router_that_stops_is_left_before_it_refuses(here: Marked, tmp_path: Path) -> None:
    router, address = start_router(here, tmp_path / "r", "--set=router.lame_duck=10m")
    workers = [start_worker(here, [address], role, tmp_path / role) for role in ROLES]
    until_joined(address)
    whole = generate(address)
    with grpc.insecure_channel(address.grpc) as channel:
        check = HealthStub(channel).Check
        assert check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
        router.send_signal(signal.SIGTERM)
        until(lambda: check(HealthCheckRequest()).status == HealthCheckResponse.NOT_SERVING)
    assert generate(address) == whole, "what comes meanwhile is served"
    router.send_signal(signal.SIGTERM)
    assert router.wait(30) == 0, (tmp_path / "r").read_text()
    for worker in workers:
        worker.terminate()
    assert [worker.wait(30) for worker in workers] == [0, 0]


def serves(router: RouterAddresses) -> bool:
    try:
        return bool(generate(router))
    except KvrelayError:
        return False


def test_a_router_that_stops_refuses_when_it_has_been_left(here: Marked, tmp_path: Path) -> None:
    router, address = start_router(here, tmp_path / "r", "--set=router.lame_duck=1s")
    worker = start_worker(here, [address], "both", tmp_path / "both")
    until(lambda: workers_of(address) == {"both"})
    generate(address)
    began_s = time.monotonic()
    router.send_signal(signal.SIGTERM)
    until(lambda: not serves(address))
    assert time.monotonic() - began_s >= 1.0
    assert router.wait(30) == 0, (tmp_path / "r").read_text()
    worker.terminate()
    assert worker.wait(30) == 0


def test_a_busy_port_is_one_line(here: Marked, tmp_path: Path) -> None:
    router, address = start_router(here, tmp_path / "r")
    command = [KVRELAY, "router", "--http-port=0"]
    others = [
        ("--grpc-port", port_of(address.grpc)),
        ("--grpc-port=0", "--set", f"router.internal_grpc_port={port_of(address.internal)}"),
    ]
    for at, options in zip(address, others, strict=True):
        second = subprocess.run(
            [*command, *options], env=here.env, capture_output=True, text=True, timeout=60
        )
        assert second.returncode == 2
        assert second.stderr.startswith("kvrelay: ")
        assert f"{at} is in use" in second.stderr
        assert second.stderr.count("\n") == 1
    router.terminate()
    assert router.wait(30) == 0


def test_a_shared_queue_is_one_routers(here: Marked, tmp_path: Path) -> None:
    """A worker of both is refused by both, and says so; a worker of one is taken."""
    shared = ("--set", "router.dispatch=shared_queue")
    started = [start_router(here, tmp_path / f"r{i}", *shared) for i in range(2)]
    routers, addresses = [one for one, _ in started], [at for _, at in started]
    of_both = start_worker(here, addresses, "decode", tmp_path / "both")
    told = "router.dispatch: shared_queue is for one router"
    for name in ("r0", "r1"):
        until(lambda name=name: told in (tmp_path / name).read_text())
    until(lambda: (tmp_path / "both").read_text().count(told) >= 2)
    assert not any(map(workers_of, addresses))
    of_one = start_worker(here, addresses[:1], "decode", tmp_path / "one")
    until(lambda: workers_of(addresses[0]) == {"decode"})
    for process in (of_both, of_one, *routers):
        process.terminate()
    assert [process.wait(30) for process in (of_both, of_one, *routers)] == [0] * 4


def test_the_first_start_makes_the_token_that_commands_find(here: Marked, tmp_path: Path) -> None:
    for name in ("KVRELAY_TOKEN_FILE", "XDG_CONFIG_HOME"):
        del here.env[name]
    router, address = start_router(here, tmp_path / "r")
    folder = Path(here.env["HOME"], ".config", "kvrelay")
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"kvrelay.token": 0o600, "kvrelay.key": 0o600}
    asked = ("status", "--address", address.internal, "--format", "json")
    assert json.loads(here.run(KVRELAY, *asked))["workers"] == []
    token = (folder / "kvrelay.token").read_text()
    (folder / "kvrelay.token").write_text("00" * 32)
    done = subprocess.run([KVRELAY, *asked], env=here.env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvrelay: {address.internal}: the token is of another cluster")
    told = here.run(KVRELAY, *asked, "--token-file", str(_copy(tmp_path, token)))
    assert json.loads(told)["workers"] == []
    assert token.strip() not in (tmp_path / "r").read_text()
    router.terminate()
    assert router.wait(30) == 0, (tmp_path / "r").read_text()


def _copy(folder: Path, token: str) -> Path:
    path = folder / "copy"
    path.write_text(token)
    path.chmod(0o600)
    return path


def test_who_runs_processes_changes_them(here: Marked, tmp_path: Path) -> None:
    """Where no controller keeps them: the commands that ask a router say so."""
    router, address = start_router(here, tmp_path / "r")
    file = tmp_path / "c.yaml"
    file.write_text("name: any\n")
    for command, reason in {
        ("scale", "decode=2"): "no controller: whoever starts them says how many there are",
        ("drain", "x", "--remove"): "no controller: whoever starts them says how many there are",
        ("apply", str(file)): "no controller: each reads the file when it starts",
        ("drain", "x"): "no worker is named x: there are none",
        ("flip", "x", "prefill"): "no worker is named x: there are none",
    }.items():
        done = subprocess.run(
            [KVRELAY, *command, "--address", address.internal],
            env=here.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr and done.stderr.count("\n") == 1, done.stderr
    router.terminate()
    assert router.wait(30) == 0
