"""The command line: what it prints, how it fails (one line, exit 2), what it must not import."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml

import cluster
from cluster.cli import main as cli
from cluster.cli.options import devices, only, served
from cluster.config.keys import POOL_KEYS, ROUTER_KEYS, WORKER_KEYS
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config, Section
from cluster.core.plan import access_of, pool_node_settings, router_settings, worker_settings
from cluster.core.resolve import Site, resolve
from cluster.core.settings import WorkerSettings
from cluster.process.net import host_towards
from kvrelay.access.values import Secrets
from kvrelay.errors import ConfigError, KvrelayError
from tests.access import TOKEN as TOKEN  # makes its file

launch = pytest.importorskip("cluster.on_ray.launch", reason="no Ray here")

COMMANDS = [
    *("serve", "stop", "demo", "chat", "batch", "models", "status", "trace", "doctor", "plan"),
    *("router", "worker", "pool-node", "config", "config show"),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs `kvrelay ...` in this process: (exit code, stdout, stderr)."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(*argv: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvrelay", *argv])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_help(run, command: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: kvrelay {command}" in out


ERRORS = {
    "nonsense": "No such command 'nonsense' (see kvrelay --help)",
    "serve --nonsense": "No such option: --nonsense (see kvrelay serve --help)",
    "serve a.yaml b.yaml": "Got unexpected extra argument(s) (b.yaml) (see kvrelay serve --help)",
    "serve none.yaml": "none.yaml: can't read it: No such file or directory",
    "serve no/such/model --port 0 --grpc-port 0": "no/such/model: no such folder; give a "
    "checkpoint's folder or a hub id",
    "serve ./model --port 0 --grpc-port 0": "./model: no such folder; give a checkpoint's folder",
    "serve README.md": "README.md: expected a cluster file (.yaml or .yml), a model's folder or a "
    "hub id",
    "serve some/model --model other": "some/model and --model other: name one model",
    "serve --port x": "Invalid value for '--port' / '--http-port': Input should be a valid "
    "integer, unable to parse string as an integer (see kvrelay serve --help)",
    "serve --http-port 70000": "router.http_port: got 70000, expected less than or equal to 65535",
    "serve --prefill 0": "Invalid value for '--prefill': Input should be greater than or equal "
    "to 1 (see kvrelay serve --help)",
    "serve --device gpu": 'workers.0.device: got "gpu", expected auto, cpu, cuda or cuda:N',
    "serve deploy/configs/one-gpu.yaml --device cpu": "--device cpu: the cluster file says "
    "workers.0.device: cuda:0",
    "serve --set engine.blocksize=3": "engine.blocksize: unknown key, did you mean block_size?",
    "serve --name Cluster!": 'name: got "Cluster!", expected a-z, 0-9 and inner dashes',
    "serve --detach": "--detach needs a Ray that keeps running: give --ray-address",
    "serve --device cuda:7 --port 0 --grpc-port 0": "workers.0.device: cuda:7, and this machine ",
    "serve --detach --ray-address http://h:8265": "Ray at http://h:8265: expected HOST:PORT of its "
    "head or auto; for http:// use ray job submit --address",
    "stop --ray-address 127.0.0.1:1": "Ray at 127.0.0.1:1: can't connect: ",
    "status --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "scale decode=2 --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "scale decode --address 127.0.0.1:1": "decode: expected POOL=N, such as decode=3",
    f"scale decode={10**30}": f"decode={10**30}: expected POOL=N, such as decode=3",
    "flip w decode --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "drain w --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "apply deploy/configs/local.yaml --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "apply deploy/configs/local.yaml --address 127.0.0.1:1 --follow": "--follow is for a command ",
    "trace": "Missing argument 'REQUEST_ID' (see kvrelay trace --help)",
    "trace r --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "status --format xml": "Invalid value for '--format': 'xml' is not one of 'table', 'json' "
    "(see kvrelay status --help)",
    "chat --address nowhere": "--address nowhere: expected HOST:PORT",
    "chat --address ftp://h:1": "--address ftp://h:1: expected HOST:PORT or https://HOST:PORT",
    "chat --temperature -1": "Invalid value for '--temperature': Input should be greater than or "
    "equal to 0",
    "batch none.jsonl out.jsonl": "Invalid value for 'IN.JSONL': ",
    "batch README.md README.md": "README.md: name another file for the answers",
    "batch README.md docs/models.md": "docs/models.md: line 1: not an answer of kvrelay batch: "
    "name another output file",
    "models nonsense": "nonsense: no causal family of transformers ",
    "worker --role prefill": "Missing option '--join' (see kvrelay worker --help)",
    "worker --join nowhere --role both": "--join nowhere: expected HOST:PORT",
    "worker --join 127.0.0.1:99999 --role both": "--join 127.0.0.1:99999: expected HOST:PORT",
    "worker --join 127.0.0.1:1 --join x --role both": "--join x: expected HOST:PORT",
    "worker --join x --role both --set network.host=h": "--join x: expected HOST:PORT",
    "worker --join 127.0.0.1:1 --role both --device gpu": 'workers.0.device: got "gpu", '
    "expected auto, cpu, cuda or cuda:N",
    'worker --join 127.0.0.1:1 --role both --takes {"min_prompt_tokens":0}': "--takes: "
    "min_prompt_tokens: got 0, expected greater than or equal to 1",
    "worker --join 127.0.0.1:1 --role both --takes long": '--takes: the rule: got "long", '
    "expected an object",
    "worker --join 127.0.0.1:1 --role both --set router.host=x": "--set router.host: not used "
    "here, only model.path, ",
    "router --set workers.0.replicas=2": "--set workers.0.replicas: not used here, only name, "
    "model.path, ",
    "pool-node --host-memory 4": 'pool.host_memory: got "4", expected a size with its unit',
    "pool-node --host-memory 900TiB --name cli-test": "pool.host_memory: 900TiB, but this ",
    "pool-node --policy fifo": "pool.policy: got \"fifo\", expected 'lru' or 'reuse'",
    "pool-node --transport tcp": "pool.transports.0: got \"tcp\", expected 'nixl' or 'ucx'",
    "pool-node --disk /proc/x --name cli-test": "pool.disk: /proc/x: No such file or directory",
    "pool-node --set router.host=x": "--set router.host: not used here, only name, pool.",
    "router --model /nowhere/at/all --http-port 0 --grpc-port 0": "/nowhere/at/all",
}


@pytest.mark.parametrize(("line", "message"), ERRORS.items())
def test_errors_are_one_line_and_exit_2(run, line: str, message: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"kvrelay: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "status --kv", "trace r", "stop"])
def test_without_a_cluster_it_says_what_to_do(  # type: ignore[no-untyped-def]
    run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_runs(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify the one")

    monkeypatch.setattr("ray.init", none_runs)
    code, out, err = run(*command.split())
    assert (code, out) == (2, "")
    assert err.startswith("kvrelay: no Ray runs on this machine: kvrelay serve starts a cluster, ")
    assert err.count("\n") == 1


def test_prefill_needs_one_pool_of_the_role(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.yaml"
    path.write_text("workers: [{role: both}, {name: more, role: both}]")
    code, _, err = run("serve", str(path), "--decode", "2")
    assert code == 2
    assert err == (
        "kvrelay: --decode 2: the cluster file has 0 decode pools, "
        "use --set workers.INDEX.replicas=N\n"
    )


def test_schema_accepts_the_defaults_and_refuses_what_the_loader_refuses(run) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run("config", "schema")
    assert code == 0
    schema = json.loads(out)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(Config().model_dump(mode="json"))
    for bad in ({"nam": "x"}, {"drain_timeout": 3}, {"workers": [{"role": "cook"}]}):
        assert not validator.is_valid(bad), bad


def test_show_prints_a_resolved_file(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.yaml"
    path.write_text("engine: {kv_memory: 64MiB}")
    code, out, _ = run("config", "show", str(path), "--set", "workers.0.cpu_threads=3")
    shown = yaml.safe_load(out)
    assert code == 0
    assert shown["engine"]["kv_memory"] == "64MiB"
    assert shown["workers"][0]["cpu_threads"] == 3
    assert shown["workers"][1]["cpu_threads"] >= 1
    assert shown["model"]["served_name"] == "kvrelay-tiny"


def test_a_cluster_file_is_told_by_its_name_and_all_else_is_a_model(tmp_path: Path) -> None:
    assert served("cluster.yaml") == (Path("cluster.yaml"), None)
    assert served("a/Cluster.YML", "org/m") == (Path("a/Cluster.YML"), "org/m")
    assert served("meta-llama/Llama-3.1-8B") == (None, "meta-llama/Llama-3.1-8B")
    assert served(str(tmp_path)) == (None, str(tmp_path))
    assert served(None, "org/m") == (None, "org/m")


def test_what_is_wrong_is_told_before_ray_starts(  # type: ignore[no-untyped-def]
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def started(**_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", started)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = run("serve", str(tmp_path), "--port", port, "--device", "cuda:9")
    assert code == 2
    assert f"the HTTP port 127.0.0.1:{port} is in use: set router.http_port to another" in err
    assert f"{tmp_path} has no config.json: it is not a checkpoint; " in err
    assert "workers.0.device: cuda:9, and this machine " in err


def test_port_and_host_are_the_routers(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    checked: list[Config] = []

    def check(config: Config) -> None:
        checked.append(config)
        raise KvrelayError("checked")

    monkeypatch.setattr("cluster.process.checks.check_here", check)
    for port in ("--port", "--http-port"):
        code, _, err = run("serve", "org/m", "--host", "0.0.0.0", port, "81")
        assert (code, err) == (2, "kvrelay: checked\n")
    for config in checked:
        assert (config.router.host, config.router.http_port) == ("0.0.0.0", 81)
        assert config.model.path == "org/m"


def test_shells_complete_commands_and_options() -> None:
    def complete(words: str) -> list[str]:
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        asked |= {"_KVRELAY_COMPLETE": "complete_bash", "PATH": os.environ["PATH"]}
        command = [str(Path(sys.executable).parent / "kvrelay")]
        environment = os.environ | asked
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.split()

    assert complete("kvrelay ser") == ["serve"]
    assert "--port" in complete("kvrelay serve --p")


@pytest.mark.parametrize(("gpus", "chunk_tokens"), [(0, 512), (1, 2048)])
def test_a_plain_worker_takes_larger_chunks_where_it_finds_a_gpu(  # type: ignore[no-untyped-def]
    run, gpus: int, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WorkerSettings] = []

    async def started_with(settings: WorkerSettings, **_: object) -> None:
        started.append(settings)

    monkeypatch.setattr("cluster.process.site.local_gpus", lambda: (gpus, ""))
    monkeypatch.setattr("cluster.process.logs.configure_logging", lambda name: None)
    monkeypatch.setattr("cluster.process.host_cpus.give_way", lambda device: None)
    monkeypatch.setattr("cluster.cli.plain.run.run_worker", started_with)
    line = ("worker", "--join", "127.0.0.1:9", "--role", "prefill", "--device", "auto")
    assert run(*line)[0] == 0
    assert [one.prefill_chunk_tokens for one in started] == [chunk_tokens]
    assert run(*line, "--set", "scheduler.prefill_chunk_tokens=64")[0] == 0
    assert started[-1].prefill_chunk_tokens == 64


def test_version(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--version") == (0, f"kvrelay {version('kvrelay')}\n", "")


@pytest.mark.parametrize(
    ("name", "running", "message"),
    [
        (None, [], "no cluster runs on this Ray"),
        ("a", [], "no cluster named a runs on this Ray"),
        ("c", ["a", "b"], "no cluster named c runs on this Ray, only a, b"),
        (None, ["a", "b"], "2 clusters run on this Ray, choose by --name: a, b"),
    ],
)
def test_no_single_cluster_to_ask(name: str | None, running: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launch.chosen(name, running)
    assert str(refused.value) == message


def test_the_only_cluster_needs_no_name() -> None:
    assert launch.chosen(None, ["one-gpu"]) == "one-gpu"
    assert launch.chosen("b", ["a", "b"]) == "b"


def test_what_stays_after_a_stop_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GONE_S", 0.0)
    monkeypatch.setattr(launch, "_actors", lambda: ["a/decode-0", "ab/router-0"])
    with pytest.raises(KvrelayError, match=r"Ray still has a/decode-0$"):
        launch._wait_gone("a")
    launch._wait_gone("b")


def test_device_is_of_every_pool_that_names_no_other(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workers: [{role: prefill}, {role: decode, device: 'cuda:1'}]")
    for source in (None, path):
        given = load_config(source, devices(source, "cuda:1"))
        assert [pool.device for pool in given.workers] == ["cuda:1", "cuda:1"]
    path.write_text("name: x")
    assert load_config(path, devices(path, "cuda")).workers[1].device == "cuda"
    path.write_text("workers: [{role: prefill}, {role: decode, device: cpu}]")
    with pytest.raises(ConfigError, match=r"--device cuda: .* workers.1.device: cpu"):
        devices(path, "cuda")


# For every key of the cluster file another value than its default.
SAMPLES: dict[str, object] = {
    "name": "other",
    "model.path": "/other",
    "model.revision": "v2",
    "model.served_name": "other",
    "model.dtype": "float16",
    "model.quantization": "fp8",
    "model.max_model_len": 99,
    "model.tool_format": "hermes",
    "model.reasoning_format": "none",
    "engine.rank_timeout": "9s",
    "engine.block_size": 32,
    "engine.memory_fraction": 0.5,
    "engine.kv_memory": "1MiB",
    "preload": [{"text": "a"}],
    "engine.prefix_caching": False,
    "engine.eviction": "reuse",
    "elastic.least_prefill": 2,
    "elastic.least_decode": 2,
    "elastic.gain": 0.1,
    "elastic.dwell": "9s",
    "elastic.cooldown": "9s",
    "elastic.start_up": "9s",
    "elastic.window": "9s",
    "engine.compile": "off",
    "engine.profile": "off",
    "engine.cuda_graphs": "off",
    "engine.launch_ahead": "off",
    "engine.kv_dtype": "fp8",
    "engine.matmul_precision": "high",
    "attention.backend": "flash",
    "scheduler.prefill_chunk_tokens": 99,
    "scheduler.mixed_chunk_tokens": 65,
    "scheduler.max_running_requests": 9,
    "workers": [{"role": "both"}],
    "router.replicas": 2,
    "router.same_ports": True,
    "router.host": "h",
    "router.http_port": 1,
    "router.grpc_port": 2,
    "router.internal_host": "node",
    "router.open_metrics": True,
    "router.internal_http_port": 3,
    "router.internal_grpc_port": 4,
    "router.public_metrics": True,
    "router.api_keys": "/keys",
    "router.api_key_hashes": ["0" * 64],
    "router.max_body": "1MiB",
    "router.record": "/log",
    "router.record_size": "1MiB",
    "router.conversations.answers": 5,
    "router.conversations.memory": "1MiB",
    "router.conversations.age": "60s",
    "router.directory_memory": "1MiB",
    "router.failover_patience": "9s",
    "router.lame_duck": "9s",
    "router.placement.policy": "random",
    "router.placement.local_prefill": "auto",
    "router.placement.move_hot_spots": True,
    "router.dispatch": "shared_queue",
    "router.admission.policy": "none",
    "router.admission.queue_limit": 9,
    "router.resources": {"x": 1},
    "qos.header": "x-tier",
    "qos.ladder.enabled": False,
    "qos.ladder.window": "9s",
    "qos.ladder.hold": "9s",
    "qos.ladder.calm": "9s",
    "qos.ladder.stricter": 0.5,
    "qos.ladder.missed": 0.05,
    "qos.ladder.tail": 3.0,
    "qos.tiers": {"t": {"ttft": "1s", "default": True}},
    "qos.tenant_weights": {"a": 2.0},
    "transfer.transports": ["nixl"],
    "transfer.handoff": "pull",
    "transfer.codec": "int8",
    "transfer.allow_mixed_precision": True,
    "transfer.staging_slabs": 9,
    "transfer.staging_bytes": "9MiB",
    "transfer.require": ["rdma"],
    "transfer.ucx.tls": "tcp",
    "transfer.ucx.net_devices": "eth0",
    "transfer.ucx.rndv_threshold_bytes": "8KiB",
    "transfer.ucx.max_eager_rails": 2,
    "transfer.canary_every": 9,
    "transfer.lease_ttl": "9s",
    "pool.host_memory": "1MiB",
    "pool.disk": "/x",
    "pool.disk_size": "1MiB",
    "pool.policy": "reuse",
    "pool.transports": ["nixl"],
    "pool.enabled": "on",
    "pool.resources": {"x": 1},
    "network.host": "h",
    "network.port_range": [2000, 3000],
    "network.token_file": "t",
    "network.key_file": "k",
    "network.tls.public": {"certificate": "c", "key": "k"},
    "network.tls.internal": {"ca": "a", "certificate": "c", "key": "k"},
    "failure.detect": "9s",
    "observability.trace_dir": "/traces",
    "ray.address": "auto",
    "ray.startup_timeout": "9s",
    "ray.hang_timeout": "9s",
    "drain_timeout": "9s",
}


def leaves(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def secrets(config: Config) -> Secrets:
    """Another file has other contents."""
    files = config.network
    return Secrets(token=str(files.token_file).encode(), key=str(files.key_file).encode())


def used(command: str, *overrides: Override) -> object:
    """All that `kvrelay router`, `worker` or `pool-node` takes from its overrides. Workers use no
    pool unless they are told to."""
    site = Site(total_cpus=2, node_cpus=2, host="127.0.0.1", bundled_path="/bundled")
    given = [Override(("pool", "enabled"), "off"), *overrides]
    config = resolve(load_config(None, given), site)
    access = access_of(config, secrets(config).token)
    if command == "router":
        return router_settings(config, secrets(config)), config.drain_timeout
    if command == "pool-node":
        return pool_node_settings(config, access), config.drain_timeout
    return worker_settings(config, config.workers[0], "w", access), config.drain_timeout


@pytest.mark.parametrize(
    ("command", "known"),
    [("router", ROUTER_KEYS), ("worker", WORKER_KEYS), ("pool-node", POOL_KEYS)],
)
def test_single_processes_take_exactly_the_keys_that_they_use(
    command: str, known: tuple[str, ...]
) -> None:
    keys = {key for key in leaves(Config) if not key.startswith("simulation.")}
    assert keys == {*SAMPLES}, "give each key a sample"
    for key, value in SAMPLES.items():
        given = Override(tuple(key.split(".")), value)
        if key in known:
            assert only([given], known) == [given]
            assert used(command, given) != used(command), f"{command} does not use {key}"
        else:
            with pytest.raises(ConfigError, match=f"--set {key}.*: not used here"):
                only([given], known)
            if key != "workers":  # the worker's own options stand for its pool
                assert used(command, given) == used(command), f"{command} uses {key}"


def test_a_whole_section_is_checked_key_by_key() -> None:
    with pytest.raises(ConfigError, match=r"--set router.replicas: not used"):
        only([Override.parse("router={host: h, replicas: 1}")], ROUTER_KEYS)


def test_a_worker_has_one_address_for_all_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"near:1": "127.0.0.1", "far:1": "10.0.0.5", "far:2": "10.0.0.5"}
    monkeypatch.setattr("cluster.process.net._host_towards", ways.__getitem__)
    assert host_towards(["far:1", "far:2"]) == "10.0.0.5"
    with pytest.raises(ConfigError, match=r"--join far:1: .* address is 10.0.0.5, but 127.0.0.1 "):
        host_towards(["near:1", "far:1"])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.processes
def test_help_and_config_import_nothing_heavy() -> None:
    heavy = ["torch", "ray", "transformers", "grpc", "numpy", "httpx"]
    done = python(
        "import sys\nfrom cluster.cli.main import main\n"
        "from cluster.process.site import local_site\n"
        "import cluster.core.plan, cluster.config.load\nlocal_site()\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.processes
def test_a_plain_router_imports_no_torch() -> None:
    done = python(
        "import asyncio, sys, cluster.router.process\n"
        "from cluster.cli.plain.run import run_router\n"
        "class Stop(Exception): pass\n"
        "def stop(settings): raise Stop\n"
        "cluster.router.process.RouterProcess = stop\n"
        "try: asyncio.run(run_router(None, drain_s=0))\n"
        "except Stop: print([n for n in ('torch', 'transformers', 'ray') if n in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.processes
def test_actors_but_workers_and_commands_before_they_run_load_no_schema_of_cluster_files() -> None:
    done = python(
        "import sys, cluster.cli.main, cluster.on_ray.actor, cluster.on_ray.door\n"
        "import cluster.pool_node.node, cluster.router.process\n"
        "print('cluster.config.schema' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


WITHOUT_RAY = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.processes
def test_serve_without_ray_says_what_to_do() -> None:
    done = python(
        WITHOUT_RAY
        + "sys.argv = ['kvrelay', 'serve', '--http-port', '0']\n"
        + "from cluster.cli.main import main\nmain()"
    )
    assert done.returncode == 2
    assert done.stderr == (
        "kvrelay: Ray isn't installed: pip install 'ray[default]', or run kvrelay router and "
        "kvrelay worker as plain processes\n"
    )


RAY_MODULES = ("launch", "fleet", "controller", "driver", "record", "door")


@pytest.mark.processes
def test_everything_but_the_launcher_imports_without_ray() -> None:
    on_ray = {f"cluster.on_ray.{name}" for name in RAY_MODULES}
    left_out = {"cluster.__main__", *on_ray}
    found = (module.name for module in pkgutil.walk_packages(cluster.__path__, "cluster."))
    imports = "".join(f"import {name}\n" for name in found if name not in left_out)
    done = python(WITHOUT_RAY + imports + "print('imported')")
    assert done.stdout == "imported\n", done.stderr


def test_only_a_second_press_of_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One press may come twice; SIGTERM may come as often as it likes."""
    handlers: dict[int, Callable[[int, object], None]] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    now_s = [100.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now_s[0])
    asked: list[str] = []
    launch._on_signals(SimpleNamespace(stop=lambda: asked.append("stop")))
    handlers[signal.SIGINT](signal.SIGINT, None)
    handlers[signal.SIGINT](signal.SIGINT, None)
    now_s[0] += 1
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert asked == ["stop"]
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGINT](signal.SIGINT, None)
    assert handlers[signal.SIGINT] is signal.SIG_DFL
