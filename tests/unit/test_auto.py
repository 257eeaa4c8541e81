"""What `auto` comes to for device, transports and the pool's memory, on machines of all kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config.load import load_config
from cluster.core.plan import pool_node_settings, worker_settings
from cluster.core.resolve import Site, resolve
from cluster.core.settings import WorkerSettings
from cluster.process import auto
from cluster.process.auto import choose_device, pool_memory, settle, settle_pool
from kvpool.transport.choice import ChosenTransports, Machine, choose_transports, spans_hosts
from kvpool.transport.gpus import GpuCount
from kvpool.transport.link_kind import LinkKind
from kvrelay.errors import ConfigError, ModelError

SITE = Site(total_cpus=2, node_cpus=2, host="127.0.0.1", bundled_path="/b")
NONE = GpuCount(count=0, why_none="this machine has no GPU")
ONE = GpuCount(count=1)
KINDS = {
    "cuda_ipc": LinkKind.CUDA_IPC,
    "shm": LinkKind.SHM,
    "nixl": LinkKind.RDMA,
    "ucx": LinkKind.TCP,
}


def choose(
    absent: str = "", *, on_gpu: bool = True, far: bool = True, require: tuple[str, ...] = ()
) -> ChosenTransports:
    machine = Machine(
        obstacle=lambda name: f"no {name} here" if name in absent.split() else "",
        kind=KINDS.__getitem__,
    )
    return choose_transports(machine, on_gpu=on_gpu, spans_hosts=far, require=require)


def test_the_fastest_that_is_there_comes_first_and_one_is_for_other_hosts() -> None:
    assert choose().transports == ("cuda_ipc", "shm", "nixl")
    assert choose("nixl").transports == ("cuda_ipc", "shm", "ucx")
    assert choose("cuda_ipc nixl ucx").transports == ("shm",)
    assert choose(on_gpu=False).transports == ("shm", "nixl")
    assert choose(far=False).transports == ("cuda_ipc", "shm")
    assert choose(on_gpu=False, far=False).transports == ("shm",)


def test_what_is_left_out_has_its_reason() -> None:
    found = choose("cuda_ipc", far=False)
    assert found.left_out == (
        ("cuda_ipc", "no cuda_ipc here"),
        ("nixl", "all workers are on this host"),
        ("ucx", "all workers are on this host"),
    )
    assert choose(on_gpu=False).left_out == (("cuda_ipc", "the device is a CPU"),)


def test_only_required_kinds_are_taken() -> None:
    assert choose(require=("rdma",)).transports == ("nixl",)
    assert choose("nixl", require=("rdma",)).transports == ()
    assert "it is shm and transfer.require is [rdma]" in choose(require=("rdma",)).why


def test_loopback_reaches_no_other_host() -> None:
    assert not any(map(spans_hosts, ("127.0.0.1", "127.0.1.1", "::1", "localhost")))
    assert all(map(spans_hosts, ("10.0.0.1", "0.0.0.0", "worker-3", "fd00::1")))


def test_a_named_device_stays() -> None:
    assert choose_device("cuda:3", None, ONE) == ("cuda:3", "")
    assert choose_device("cpu", 1.0, ONE) == ("cpu", "")


def test_without_ray_a_gpu_is_taken_where_there_is_one() -> None:
    assert choose_device("auto", None, ONE) == ("cuda", "this machine has a GPU")
    assert choose_device("auto", None, NONE) == ("cpu", "this machine has no GPU")
    few = "this machine has fewer GPUs, 1, than the 2 ranks need"
    assert choose_device("auto", None, ONE, ranks=2) == ("cpu", few)


def test_on_ray_the_gpu_that_was_set_aside_is_taken() -> None:
    assert choose_device("auto", 1.0, ONE) == ("cuda", "a GPU is set aside for it")
    assert choose_device("auto", 0.5, ONE) == ("cuda", "0.5 of a GPU is set aside for it")
    assert choose_device("auto", 0.0, NONE)[0] == "cpu"
    device, why = choose_device("auto", 0.0, ONE)
    assert (device, why.startswith("no GPU is set aside")) == ("cpu", True)


def test_a_gpu_that_pytorch_can_not_use_is_an_error() -> None:
    built = GpuCount(count=0, why_none="PyTorch 2.13.0+cpu is built without CUDA")
    with pytest.raises(ModelError, match=r"set a GPU aside .* built without CUDA: set device: cpu"):
        choose_device("auto", 1.0, built)


def default_settings() -> WorkerSettings:
    config = resolve(load_config(None), SITE)
    return worker_settings(config, config.workers[0], "prefill-0")


def test_a_default_worker_here_runs_on_the_cpu_over_shm() -> None:
    """On this machine as it is, but for its GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "count_gpus", lambda: NONE)
        settled, said = settle(default_settings())
    assert (settled.device, settled.transports) == ("cpu", ("shm",))
    assert said == (
        "device cpu (this machine has no GPU), KV over shm "
        "(not nixl, ucx: all workers are on this host)"
    )


def test_named_transports_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(transport: str, **_: object) -> str:
        raise AssertionError(f"{transport} was opened")

    monkeypatch.setattr(auto, "obstacle", tried)
    monkeypatch.setattr(auto, "count_gpus", lambda: ONE)
    named = replace(default_settings(), gpus=1.0, transports=("nixl", "shm"))
    settled, said = settle(named)
    assert (settled.device, settled.transports) == ("cuda", ("nixl", "shm"))
    assert said == "device cuda (a GPU is set aside for it), KV over nixl, shm"


def test_a_worker_on_a_gpu_tries_cuda_ipc_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, object]] = []

    def obstacle(transport: str, *, device: str, **_: object) -> str:
        tried.append((transport, device))
        return "" if transport != "nixl" else "nixl isn't installed"

    monkeypatch.setattr(auto, "obstacle", obstacle)
    monkeypatch.setattr(auto, "count_gpus", lambda: ONE)
    settings = replace(default_settings(), gpus=1.0, host="10.0.0.1")
    settled, said = settle(settings)
    assert settled.transports == ("cuda_ipc", "shm", "ucx")
    assert "KV over cuda_ipc, shm, ucx (not nixl: nixl isn't installed)" in said
    assert tried[0] == ("cuda_ipc", "cuda")


def test_no_transport_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "obstacle", lambda transport, **_: "broken")
    with pytest.raises(ConfigError, match=r"^no transport can be used: .*shm: broken"):
        settle(default_settings())


def test_a_pool_node_takes_a_link_to_other_hosts_where_they_can_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "obstacle", lambda transport, **_: "")
    settings = pool_node_settings(resolve(load_config(None), SITE))
    assert auto.far_transports(settings) == ()
    assert auto.far_transports(replace(settings, host="10.0.0.1")) == ("nixl",)
    assert auto.far_transports(replace(settings, transports=("ucx",))) == ("ucx",)


GIB = 2**30


@pytest.mark.parametrize(
    ("available", "size"),
    [(0, None), (GIB - 1, None), (GIB, GIB // 4), (40 * GIB, 10 * GIB), (2**40, 64 * GIB)],
)
def test_a_pool_takes_a_quarter_of_what_is_available(available: int, size: int | None) -> None:
    found, why = pool_memory(available)
    assert found == size
    assert f"{available / GIB:.1f} GiB available" in why


def test_a_pool_node_settles_its_memory_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pool_node_settings(resolve(load_config(None), SITE))
    assert settings.host_bytes is None
    monkeypatch.setattr(auto, "available_bytes", lambda: 10 * GIB + 12345)
    settled, chosen = settle_pool(settings)
    assert settled == replace(settings, host_bytes=10 * GIB // 4)
    assert chosen == "2.5 GiB of host memory (a quarter of the 10.0 GiB available)"
    monkeypatch.setattr(auto, "available_bytes", lambda: GIB // 2)
    says = "no memory to spare: a quarter of the 0.5 GiB available is less than 256MiB"
    with pytest.raises(ConfigError, match=says):
        settle_pool(settings)
    given = replace(settings, host_bytes=2 * GIB)
    assert settle_pool(given) == (given, "2GiB of host memory"), "as given, whatever is available"
