"""Building the CPU kernel: once, whole, and with a plain word where it can't be."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.native import kernel
from engine.attention.native.kernel import SOURCE
from engine.device import kept_files, native_build
from engine.device.native_build import BuildError, Source, built
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane

needs_compiler = pytest.mark.skipif(
    not any(map(native_build.shutil.which, SOURCE.compilers)), reason="no C++ compiler here"
)


def layout(dtype: str = "float32", dim: int = 16) -> KvLayout:
    planes = (Plane(name="k", heads=2, dim=dim), Plane(name="v", heads=2, dim=dim))
    group = LayerGroup(layers=(0,), planes=planes)
    return KvLayout(groups=(group,), dtype=dtype, block_size=16)


def fake_compiler(folder: Path, script: str) -> Source:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return replace(SOURCE, compilers=(str(path),))


@pytest.fixture(autouse=True)
def _fresh_kernel() -> None:
    kernel.host_kernel.cache_clear()


def test_no_compiler_is_said_once_and_torch_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    none = replace(SOURCE, compilers=("no-such-compiler",))
    monkeypatch.setattr(kernel, "SOURCE", none)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert kernel.kernel_for(layout(), torch.device("cpu")) is None
    (line,) = caplog.messages
    assert "no compiler (no-such-compiler) is installed: install no-such-compiler" in line
    kernel.host_kernel.cache_clear()


def kept_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = fake_compiler(tmp_path, 'echo "error: unknown -march" >&2; exit 1')
    expected = r"could not build attention.cpp \(error: unknown -march\)"
    with pytest.raises(BuildError, match=expected):
        built(broken, tmp_path / "cache")
    assert kept_in(tmp_path / "cache") == []


def test_a_compiler_that_dies_leaves_no_half_of_a_library(tmp_path: Path) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; kill -9 $$'
    with pytest.raises(BuildError, match="exit status -9"):
        built(fake_compiler(tmp_path, script), tmp_path / "cache")
    assert kept_in(tmp_path / "cache") == []


def test_of_those_that_come_together_one_builds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""case "$*" in *--version*) exit;; esac
        echo begun >> {log}; sleep 0.2
        while [ "$1" != -o ]; do shift; done; echo whole > "$2" """
    source = fake_compiler(tmp_path, script)
    with ThreadPoolExecutor(4) as pool:
        made = {*pool.map(lambda _: built(source, tmp_path / "cache"), range(4))}
    assert [path.read_text() for path in made] == ["whole\n"]
    assert log.read_text() == "begun\n"


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(kept_files.fcntl, "flock", no_locks)
    script = 'while [ "$1" != -o ]; do shift || exit 0; done; echo whole > "$2"'
    path = built(fake_compiler(tmp_path, script), tmp_path / "cache")
    assert path.read_text() == "whole\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"can't be kept in .*file"):
        built(SOURCE, tmp_path / "file" / "cache")


def test_a_library_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "attention.so"
    path.write_text("half")
    with pytest.raises(BuildError, match=r"attention.so can't be loaded .*: remove it"):
        kernel.open_kernel(path)


def _build_in(folder: Path) -> None:
    built(SOURCE, folder)


@pytest.mark.processes
@needs_compiler
def test_several_processes_build_one_file_that_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes = [
        multiprocessing.get_context("spawn").Process(target=_build_in, args=(tmp_path,))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    (path,) = tmp_path.glob("*.so")
    made_ns = path.stat().st_mtime_ns
    with caplog.at_level(logging.INFO):
        assert built(SOURCE, tmp_path) == path
    assert path.stat().st_mtime_ns == made_ns
    assert not caplog.messages
    kernel.open_kernel(path)


@needs_compiler
def test_the_kernel_adds_no_thread_to_those_of_torch() -> None:
    """One team of OpenMP threads: a second one would take the first one's cores."""
    found = kernel.kernel_for(layout(), torch.device("cpu"))
    assert found is not None and found.fork
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.ones(1 << 20).add_(1)
        threads = {*os.listdir("/proc/self/task")}
        _attend_with(found)
        assert {*os.listdir("/proc/self/task")} <= threads
    finally:
        torch.set_num_threads(before)


def _attend_with(found: kernel.Kernel) -> None:
    from tests.unit.native_kit import Heads, make_batch
    from tests.unit.test_native_attention import plain

    heads = Heads(query=4, kv=2, dim=16, value_dim=16)
    make_batch(((600, 1), (0, 200)), heads).attend(found, plain(heads))


def test_what_the_kernel_does_not_serve_is_left_to_torch() -> None:
    odd = layout(dim=17)
    assert kernel.kernel_for(odd, torch.device("cpu")) is None
    assert kernel.kernel_for(layout(), torch.device("meta")) is None
