"""What keeps UCX from CMA, in the words of kvrelay doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.transport import link_kind
from kvpool.transport.link_kind import UcxInfo

BUILT = ("self", "tcp", "sysv", "posix", "cma")


def told(
    tmp_path: Path, *, resources: tuple[str, ...], components: tuple[str, ...], scope: str
) -> str | None:
    path = tmp_path / "ptrace_scope"
    path.write_text(f"{scope}\n")
    info = UcxInfo(version="1.19.0", components=components, resources=resources)
    return link_kind.obstacle(info, "tcp", path)


def test_nothing_where_ucx_has_it(tmp_path: Path) -> None:
    resources = ("tcp/eth0", "cma/memory")
    assert told(tmp_path, resources=resources, components=BUILT, scope="3") is None


def test_the_build_comes_first_then_the_kernel(tmp_path: Path) -> None:
    resources = ("tcp/eth0", "cmafoo/memory")
    built = told(tmp_path, resources=resources, components=BUILT[:-1], scope="2")
    assert built == "its UCX was built without it"
    kept = told(tmp_path, resources=resources, components=BUILT, scope="2")
    assert kept == "kernel.yama.ptrace_scope is 2: set it to 0 or 1"


def test_seccomp_is_seen_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_kind, "try_write", lambda: "Operation not permitted")
    kept = told(tmp_path, resources=(), components=BUILT, scope="1")
    assert kept is not None
    assert kept.startswith("process_vm_writev fails: Operation not permitted; a container needs")


def test_else_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_kind, "try_write", lambda: None)
    kept = told(tmp_path, resources=("tcp/eth0",), components=BUILT, scope="0")
    assert kept == "UCX_TLS=tcp leaves it out"
    assert link_kind.obstacle(
        UcxInfo(version="", components=BUILT, resources=()), None, tmp_path
    ) == ("UCX found it unusable"), "without Yama, as here, the kernel allows it"


def test_this_process_may_write_to_itself() -> None:
    assert link_kind.try_write() is None
