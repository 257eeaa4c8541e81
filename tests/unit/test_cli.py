"""The command line: what it prints, how it fails (one line, exit 2), what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster import cli
from cluster.config import Config

COMMANDS = ["serve", "stop", "demo", "status", "router", "worker", "config", "config show"]


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
    "serve --http-port x": "Invalid value for '--http-port': Input should be a valid integer, "
    "unable to parse string as an integer (see kvrelay serve --help)",
    "serve --http-port 70000": "router.http_port: got 70000, expected less than or equal to 65535",
    "serve --prefill 0": "workers.0.replicas: got 0, expected greater than or equal to 1",
    "serve --set engine.blocksize=3": "engine.blocksize: unknown key, did you mean block_size?",
    "serve --name Cluster!": 'name: got "Cluster!", expected a-z, 0-9 and inner dashes',
    "serve --detach --ray-address http://h:8265": "Ray at http://h:8265: expected HOST:PORT of its "
    "head or auto; for http:// use ray job submit --address",
    "stop --ray-address 127.0.0.1:1": "Ray at 127.0.0.1:1: can't connect: ",
    "status --address 127.0.0.1:1": "127.0.0.1:1: no router answers: ",
    "status --format xml": "Invalid value for '--format': 'xml' is not one of 'table', 'json' "
    "(see kvrelay status --help)",
    "worker --role prefill": "Missing option '--join' (see kvrelay worker --help)",
    "worker --join nowhere --role both": "--join nowhere: expected HOST:PORT",
    "worker --join 127.0.0.1:99999 --role both": "--join 127.0.0.1:99999: expected HOST:PORT",
    "worker --join 127.0.0.1:1 --role both --device gpu": 'workers.0.device: got "gpu", '
    "expected cpu, cuda or cuda:N",
    "worker --join 127.0.0.1:1 --role both --set router.host=x": "--set router.host: not used "
    "here, only model, engine, scheduler, transfer, network, drain_timeout are",
    "router --set workers.0.replicas=2": "--set workers.0.replicas: not used here, only name, "
    "model, router, drain_timeout are",
    "router --model /nowhere/at/all --http-port 0 --grpc-port 0": "/nowhere/at/all",
}


@pytest.mark.parametrize(("line", "message"), ERRORS.items())
def test_errors_are_one_line_and_exit_2(run, line: str, message: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"kvrelay: {message}")
    assert err.count("\n") == 1


def test_prefill_needs_one_pool_of_the_role(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.yaml"
    path.write_text("workers: [{role: both}, {role: both}]")
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


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_and_config_import_nothing_heavy() -> None:
    heavy = ["torch", "ray", "transformers", "grpc", "numpy"]
    done = python(
        "import sys\nfrom cluster.cli import main\nfrom cluster.site import local_site\n"
        "import cluster.plan, cluster.config_load\nlocal_site()\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


WITHOUT_RAY = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Hidden())
"""


def test_serve_without_ray_says_what_to_do() -> None:
    done = python(
        WITHOUT_RAY
        + "sys.argv = ['kvrelay', 'serve', '--http-port', '0']\n"
        + "from cluster.cli import main\nmain()"
    )
    assert done.returncode == 2
    assert done.stderr == (
        "kvrelay: Ray isn't installed: pip install 'ray[default]', or run kvrelay router and "
        "kvrelay worker as plain processes\n"
    )


def test_everything_but_the_launcher_imports_without_ray() -> None:
    left_out = {"__init__", "__main__", "launch", "fleet", "controller"}
    folder = Path(cli.__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem not in left_out)
    imports = "".join(f"import cluster.{name}\n" for name in names)
    done = python(WITHOUT_RAY + imports + "print('imported')")
    assert done.stdout == "imported\n", done.stderr
