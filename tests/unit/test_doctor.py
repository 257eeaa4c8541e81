"""kvrelay doctor on this machine, as a user runs it."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cluster.cli import main as cli
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.process import auto, doctor
from cluster.process.doctor import Diagnosis, examine
from kvpool.transport.gpus import GpuFacts
from kvpool.transport.link_kind import LinkKind
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from tests.contract.fake_device import FakeDevice, install_network, reaches_devices


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvrelay", "doctor", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_default_cluster_can_run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    out = capsys.readouterr().out
    assert "shm  usable (shm)" in out
    assert "kvrelay[nixl]" in out and "memlock limit: " in out and "UCX: " in out
    assert "CMA (process_vm_writev) within a host: " in out
    assert "this cluster can run here" in out
    assert "snapshots by CRIU: " in out
    (pair,) = [line.split() for line in out.splitlines() if line.startswith(" workers.0")]
    assert pair == ["workers.0", "(prefill)", "workers.1", "(decode)", "shm", "nixl"]


def test_an_extra_that_is_absent_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "transport 'nixl' needs its extra: pip install 'kvrelay[nixl]'"
    monkeypatch.setattr(doctor, "obstacle", lambda name, *_, **__: why if name == "nixl" else "")
    run(monkeypatch)
    assert f"nixl  not usable: {why}\n" in capsys.readouterr().out


def test_json_holds_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transports = "transfer.transports=[shm, nixl]"
    assert run(monkeypatch, "--format", "json", "--set", transports) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    (choice,) = found["choices"]
    assert (choice["same_host"], choice["between_hosts"]) == ("shm", "nixl")
    names = [finding["transport"] for finding in found["findings"]]
    assert names == ["cuda_ipc", "shm", "nixl", "ucx"]


def test_what_is_required_and_absent_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--set", "transfer.require=[cuda_ipc]") == 1
    out = capsys.readouterr().out
    assert "problem: transfer.transports: none can be used here: cuda_ipc: no CUDA device; " in out
    assert "shm: it is shm and "
    assert "transfer.require is [cuda_ipc]" in out


def test_what_serve_would_refuse_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("no/such/model", "--set", f"router.http_port={port}")
        assert run(monkeypatch, *options) == 1
    out = capsys.readouterr().out
    assert (
        f"problem: the HTTP port 127.0.0.1:{port} is in use: set router.http_port to another" in out
    )
    assert "problem: no/such/model: no such folder" in out
    assert "this cluster can run here" not in out


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = GpuFacts(names=("A", "B"), without_peer_access=((0, 1),), expandable_segments=True)
    monkeypatch.setattr(doctor, "gpu_facts", lambda: facts)


def diagnosed(*pools: dict[str, object]) -> Diagnosis:
    overrides = [
        Override(("workers",), list(pools)),
        Override(("transfer", "transports"), ["cuda_ipc", "shm"]),
    ]
    return examine(load_config(None, overrides))


def test_a_gpu_that_is_not_there_is_a_problem(two_gpus: None) -> None:
    found = diagnosed(
        {"role": "prefill", "device": "cuda:1"}, {"role": "decode", "device": "cuda:2"}
    )
    assert found.problems == ("workers.1.device: cuda:2, and this machine has 2 GPUs",)
    facts = {finding.transport: finding.facts for finding in found.findings}["cuda_ipc"]
    assert facts["devices"] == "0: A, 1: B"
    assert facts["peer access"] == "all but 0-1"
    assert facts["shareable memory"].startswith("expandable segments are on")


def test_cuda_ipc_is_for_pairs_of_gpus(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._finding

    def usable(transport: str, *rest: Any) -> doctor.Finding:
        found = real(transport, *rest)
        return replace(found, usable=True, why="", kind=LinkKind(found.kind))

    monkeypatch.setattr(doctor, "_finding", usable)
    found = diagnosed(
        {"role": "prefill", "device": "cuda:0"},
        {"role": "decode", "device": "cuda:1"},
        {"role": "decode", "device": "cpu"},
    )
    assert [choice.same_host for choice in found.choices] == ["cuda_ipc", "shm"]


def on_fake_device(monkeypatch: pytest.MonkeyPatch, refusal: str) -> FakeDevice:
    device, allocate = FakeDevice(refusal=refusal), SlabMemory.allocate

    def allocated(slabs: SlabMemory, nbytes: int) -> torch.Tensor:
        on_host = slabs.place is SlabPlace.HOST
        return allocate(slabs, nbytes) if on_host else device.allocate(nbytes)

    monkeypatch.setattr(SlabMemory, "check", lambda _: None)
    monkeypatch.setattr(SlabMemory, "allocate", allocated)
    install_network(device, monkeypatch.setattr)
    return device


@pytest.mark.parametrize("lacks", ["a network", "GPUDirect", "registration", None])
def test_whether_a_network_reaches_the_memory_of_gpus_is_shown(
    two_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lacks: str | None,
) -> None:
    no_network = "no device" if lacks == "a network" else None
    no_module = "no module is loaded" if lacks == "GPUDirect" else None
    reaches_devices(monkeypatch.setattr, no_rdma=no_network, no_module=no_module)
    refusal = "it took no memory of a device" if lacks == "registration" else ""
    device = on_fake_device(monkeypatch, refusal)
    run(monkeypatch)
    known = no_network or no_module
    why = f"memory can't be registered: {refusal}" if refusal else known
    says = f"no, by way of the host's: {why}" if why else "yes, 4096 bytes of it were registered"
    assert len(device.seen) == (0 if known else 2), "what is known to fail is not tried"
    told = f"GPU memory (GPUDirect): {says}"
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("GPU memory")] == [told, told]


def test_without_a_gpu_nothing_is_said_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    assert "GPUDirect" not in capsys.readouterr().out


def test_the_pool_that_would_be_chosen_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With too little memory: with auto the cluster runs without a pool, with on it can't run."""

    def shown(*options: str) -> tuple[int, str]:
        code = run(monkeypatch, *options)
        lines = capsys.readouterr().out.splitlines()
        (found,) = (line for line in lines if line.startswith("KV pool of this host: "))
        return code, found.removeprefix("KV pool of this host: ")

    monkeypatch.setattr(auto, "available_bytes", lambda: 2**33)
    assert shown() == (0, "2.0 GiB of host memory (a quarter of the 8.0 GiB available)")
    assert shown("--set", "pool.enabled=off") == (0, "off")
    assert shown("--set", "pool.host_memory=3GiB") == (0, "3GiB of host memory")
    monkeypatch.setattr(auto, "available_bytes", lambda: 2**29)
    code, text = shown()
    assert code == 0 and text.startswith("none: no memory to spare")
    assert shown("--set", "pool.enabled=on")[0] == 1


# --- CRIU ---------------------------------------------------------------------------------------

DEBIAN = """\
Error (criu/util.c:642): exited, status=1
Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds
Error (criu/vdso.c:613): vdso: Failed to fill self vdso symtable
"""


def criu(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "criu"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_what_criu_says_where_it_can_not_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    criu(tmp_path, f"cat >&2 <<'E'\n{DEBIAN}E\nexit 1\n", monkeypatch)
    assert doctor._snapshots() == (
        "no: Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds; "
        "Error (criu/vdso.c:613): vdso: Failed to fill self vdso symtable"
    )
    criu(tmp_path, "echo 'You need to be root' >&2; exit 1", monkeypatch)
    assert doctor._snapshots() == "no: You need to be root"
    criu(tmp_path, "exit 3", monkeypatch)
    assert doctor._snapshots() == "no: criu dump ended with 3"


def test_a_process_that_runs_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends, however that went."""
    note = tmp_path / "note"
    kept = f'[ -d /proc/$3 ] && [ -d "$5" ] && echo "$1 $2 $3 $4 $6" > {note}'
    criu(tmp_path, kept, monkeypatch)
    from_s = time.monotonic()
    assert doctor._snapshots() == "yes"
    assert time.monotonic() - from_s < 30, "it would sleep for a minute"
    told = note.read_text().split()
    assert told[:2] + told[3:] == ["dump", "--tree", "--images-dir", "--leave-running"]
    assert not psutil.pid_exists(int(told[2]))


def test_a_criu_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CRIU_S", 0.2)
    criu(tmp_path, "exec sleep 60", monkeypatch)
    assert "timed out after 0.2 seconds" in doctor._snapshots()


def test_without_criu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda *_, **__: None)
    assert doctor._snapshots() == "no: criu is not installed"
    assert examine(load_config(None, [])).problems == (), "it is no problem"
