"""The image is built and run where a container tool works. Elsewhere the Dockerfile's steps run in
a fresh environment.

Left out are then the base image, `apt-get` and the user: they need a root file system of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.integration.manifests import DEPLOY
from tests.pins import EXTRA, installed, pinned

REPOSITORY = DEPLOY.parent
NEEDS_ITS_OWN_ROOT = ("apt-get", "useradd")
IMAGE = "kvrelay-test"

Step = tuple[str, str]
"""Instruction and the rest of its line."""


def steps(stage: str) -> Iterator[Step]:
    """Those of a stage of the Dockerfile, one line each."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    inside = False
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            inside = rest.endswith(f" AS {stage}")
        elif inside:
            yield instruction, rest


def copy(rest: str, source: Path, target: Path) -> None:
    *names, _ = rest.split()
    for name in names:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / name, target / name, ignore=ignored)
        else:
            shutil.copy(source / name, target / Path(name).name)


def build(stage: str, folder: Path, env: dict[str, str]) -> list[str]:
    """Runs `base` and the stage; returns the commands that were left out."""
    left_out: list[str] = []
    for instruction, rest in (*steps("base"), *steps(stage)):
        match instruction:
            case "COPY" if rest.startswith("--from=source"):
                for _, named in steps("source"):
                    copy(named, REPOSITORY, folder)
            case "COPY":
                copy(rest, REPOSITORY, folder)
            case "RUN" if any(word in rest for word in NEEDS_ITS_OWN_ROOT):
                left_out.append(rest)
            case "RUN":
                subprocess.run(["sh", "-ec", rest], cwd=folder, env=env, check=True)
    return left_out


def test_every_version_is_pinned_within_what_the_project_allows() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][EXTRA]]
    for one in map(Requirement, asked):
        assert pinned()[canonicalize_name(one.name)] in one.specifier, one
    assert installed().keys() == pinned().keys(), "python -m tests.pins"


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_what_is_installed_from_an_index_is_pinned(stage: str) -> None:
    installs = [rest for name, rest in steps(stage) if name == "RUN"]
    parts = [part for rest in installs for part in rest.split("&&")]
    assert parts
    for part in parts:
        assert "-c constraints.txt" in part or "--no-deps --no-build-isolation ." in part, part


def container_tool() -> str | None:
    """One that works: `info` also asks the daemon of those that have one."""
    for tool in ("docker", "podman", "buildah"):
        asked = [tool, "info"]
        if shutil.which(tool) and subprocess.run(asked, capture_output=True).returncode == 0:
            return tool
    return None


def with_tool(tool: str) -> None:
    """Builds the image, and serves in a container."""
    build = [tool, "build", "-f", "deploy/Dockerfile", "--target", "cpu", "-t", IMAGE, "."]
    serve = [[tool, "run", "--rm", "--shm-size=1g", IMAGE, "demo"]]
    if tool == "buildah":
        begin, end = ["buildah", "from", "--name", IMAGE, IMAGE], ["buildah", "rm", IMAGE]
        serve = [begin, ["buildah", "run", IMAGE, "--", "kvrelay", "demo"], end]
    for command in (build, *serve):
        subprocess.run(command, cwd=REPOSITORY, check=True)


def a_tool(folder: Path, name: str, code: int) -> None:
    """A program of this name that notes how it is called; `info` ends with this code."""
    path = folder / name
    notes = f'echo {name} "$@" >> {folder}/calls'
    path.write_text(f'#!/bin/sh\n{notes}\n[ "$1" != info ] || exit {code}\n')
    path.chmod(0o755)


@pytest.mark.parametrize("works", ["docker", "podman", "buildah", None])
def test_the_tool_that_works_builds_and_serves(
    works: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for name in ("docker", "podman", "buildah"):
        a_tool(tmp_path, name, code=0 if name == works else 1)
    assert container_tool() == works
    if works is not None:
        with_tool(works)
        calls = (tmp_path / "calls").read_text().splitlines()
        built, *served = [line for line in calls if " info" not in line]
        assert built == f"{works} build -f deploy/Dockerfile --target cpu -t {IMAGE} ."
        assert any(line.endswith(" demo") for line in served)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_cpu_image_serves(tmp_path: Path) -> None:
    tool = container_tool()
    if tool is not None:
        with_tool(tool)
    else:
        with_steps(tmp_path)


def with_steps(tmp_path: Path) -> None:
    folder, venv = tmp_path / "opt", tmp_path / "venv"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    left_out = build("cpu", folder, env)
    assert len(left_out) == len(NEEDS_ITS_OWN_ROOT)
    shutil.rmtree(folder)
    for command in (["pip", "check"], ["kvrelay", "--version"], ["kvrelay", "demo"]):
        program = venv / "bin" / command[0]
        done = subprocess.run(
            [program, *command[1:]], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert (venv / "bin" / "ray").exists(), "KubeRay starts it"
    assert {name: pinned()[name] for name in got(venv)} == got(venv)


def got(venv: Path) -> dict[str, str]:
    """# distribution |-> its version in the image, but for kvrelay and what made the environment"""
    command = [venv / "bin" / "pip", "freeze"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = re.findall(r"^([\w.-]+)==([\w.]+)", done.stdout, re.M)
    return {canonicalize_name(name): version for name, version in lines}
