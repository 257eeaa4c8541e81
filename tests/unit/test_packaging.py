"""What leaves the repository: Ray's runtime environment, the image's build context, the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePath

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BUILT = (".venv*", "*.egg-info", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNTIME_ENV = yaml.safe_load((ROOT / "deploy" / "runtime-env.yaml").read_text())


def package_folders() -> dict[str, Path]:
    """# package |-> its folder below the root"""
    tools = PROJECT["tool"]["setuptools"]
    folders = {name: Path(*name.split(".")) for name in tools["packages"]}
    for root, folder in tools["package-dir"].items():
        for name in folders:
            if name.split(".")[0] == root:
                folders[name] = Path(folder, *name.split(".")[1:])
    return folders


def packaged() -> list[Path]:
    """Every file that a build needs, below the root."""
    named = ["pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]
    sources = [f for folder in package_folders().values() for f in (ROOT / folder).glob("*.py")]
    checkpoint = (ROOT / "engine" / "bundled" / "checkpoint").iterdir()
    return [Path(name) for name in named] + [f.relative_to(ROOT) for f in (*sources, *checkpoint)]


def test_the_runtime_environment_installs_the_working_directory() -> None:
    assert RUNTIME_ENV.keys() == {"working_dir", "excludes", "pip", "env_vars"}
    assert RUNTIME_ENV["working_dir"] == "."
    assert RUNTIME_ENV["pip"] == {"packages": ["${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"]}
    assert all(isinstance(value, str) for value in RUNTIME_ENV["env_vars"].values())


def test_the_runtime_environment_leaves_out_nothing_that_is_packaged() -> None:
    """Plain names exclude at any depth, as in a .gitignore."""
    excluded = set(RUNTIME_ENV["excludes"])
    assert not any(set(name) & set("/*?[!") for name in excluded)
    assert len(packaged()) > 100
    for path in packaged():
        assert not excluded & set(path.parts), path


def test_the_image_has_all_that_is_packaged() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert {path.parts[0] for path in packaged()} <= copied


@pytest.mark.processes
def test_a_wheel_builds_from_what_ray_uploads(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*RUNTIME_ENV["excludes"], *BUILT))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    options = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([*pip, "-w", tmp_path, source], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("kvrelay-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {str(PurePath(name).parent) for name in names}
    assert {name.replace(".", "/") for name in package_folders()} <= folders
    assert "engine/bundled/checkpoint/model.safetensors" in names
    assert [name for name in names if PurePath(name).match("engine/bundled/*.py")] == [
        "engine/bundled/__init__.py"
    ]
    assert not any(name.startswith("bench") for name in names)
    assert "engine/compiled/source/fused.cpp" in names
    assert "kvrelay/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
