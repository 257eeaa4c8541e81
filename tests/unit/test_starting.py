"""What a process that starts says that it does: from the download to the words on the console."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.cli.plain import joins, run
from cluster.on_ray.reports import waits_for_room
from cluster.process.bars import DownloadBars
from cluster.worker.process import WorkerProcess
from engine.core.activity import Stage, StartActivity
from engine.model.checkpoint import find_text_files, open_checkpoint
from kvrelay.access.values import NO_ACCESS
from kvrelay.errors import ConfigError, ModelError
from kvrelay.types import Role
from kvrelay.v1 import worker_pb2
from tests.integration.split_kit import worker_settings
from tests.models import random_checkpoint

CPU = {"CPU": 1.0}
GPU = {"GPU": 1.0}


# --- the hub's client, at its edge --------------------------------------------------------------


def moving_bars(folder: Path) -> Any:
    """As huggingface_hub 2.4 moves its bars in `snapshot_download`: bytes from the network, bytes
    on disk, and files, of which a total is known only as files begin."""

    def download(hub_id: str, *, tqdm_class: type[Any], **_: object) -> str:
        network = tqdm_class(desc="Downloading bytes", total=0, unit="B", unit_scale=True)
        disk = tqdm_class(desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True)
        with tqdm_class(desc="Fetching 2 files", total=2) as files:
            for size in (300, 700):
                disk.total += size
                network.total += size
                network.update(size // 2)
                disk.update(size // 2)
                disk.update(size - size // 2)
                files.update(1)
        return str(folder)

    return download


@pytest.fixture
def fake_hub(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", moving_bars(llama_folder))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("hub"))


def test_a_download_tells_how_far_it_is_and_draws_nothing(
    fake_hub: None, llama_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[StartActivity] = []
    found = open_checkpoint("some/model", None, heard.append)
    assert found.path == llama_folder
    assert {activity.stage for activity in heard} == {Stage.DOWNLOADS}
    done = [activity.done_bytes for activity in heard]
    assert done == sorted(done)
    assert (heard[0].total_bytes, heard[0].done_bytes) == (0, 0)
    assert (heard[-1].total_bytes, heard[-1].done_bytes) == (1000, 1000)
    assert capfd.readouterr() == ("", "")


def test_a_router_downloads_its_text_files_too(fake_hub: None) -> None:
    heard: list[StartActivity] = []
    find_text_files("some/model", None, heard.append)
    assert heard[-1].done_bytes == 1000


def test_the_hubs_own_client_takes_our_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf_thread_map` and `_create_progress_bar` are what `snapshot_download` uses."""
    from engine.model.download import bars_for

    heard: list[StartActivity] = []
    bars = bars_for(heard.append)
    module = __import__("huggingface_hub.utils.tqdm", fromlist=["tqdm"])
    made = getattr(module, "_create_progress_bar", None)
    if made is None:
        pytest.skip("another huggingface_hub")
    bar = made(cls=bars, log_level=30, name="x", desc="bytes", total=8, unit="B", unit_scale=True)
    threads = module.hf_thread_map(lambda n: bar.update(n), [3, 5], tqdm_class=bars, desc="files")
    assert len(threads) == 2
    assert heard[-1] == StartActivity(stage=Stage.DOWNLOADS, done_bytes=8, total_bytes=8)


# --- a worker -----------------------------------------------------------------------------------


def test_a_worker_says_each_thing_that_it_does(
    fake_hub: None, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    class Watched(WorkerProcess):
        def _now_does(self, activity: StartActivity) -> None:
            super()._now_does(activity)
            if activity.stage not in heard:
                heard.append(activity.stage)

    settings = worker_settings("both-0", Role.BOTH, Path("some/model"), profile="auto")
    process = Watched(settings)
    assert process.activity == StartActivity(stage=Stage.STARTS)
    parts = process._build()
    parts.close()
    assert heard == [
        *(Stage.CHOOSES, Stage.DOWNLOADS, Stage.LOADS),
        *(Stage.COMPILES, Stage.CHECKS, Stage.TIMES),
    ]
    assert process.chosen == "device cpu, KV over shm"


def test_a_model_that_is_nowhere_is_an_error() -> None:
    process = WorkerProcess(worker_settings("both-0", Role.BOTH, Path("/no/such/model")))
    with pytest.raises(ModelError, match="no such folder"):
        process._build()


# --- in words -----------------------------------------------------------------------------------


def test_an_activity_in_words() -> None:
    assert str(StartActivity(stage=Stage.LOADS)) == "loads the model"
    begun = StartActivity(stage=Stage.DOWNLOADS)
    assert str(begun) == "downloads the model"
    half = StartActivity(
        stage=Stage.DOWNLOADS, done_bytes=8_030_000_000, total_bytes=16_060_000_000
    )
    assert str(half) == "downloads the model: 8.03 of 16.06 GB (50%)"


def drawn(bars: DownloadBars, out: io.StringIO, downloads: dict[str, StartActivity]) -> str:
    bars.show(downloads)
    if bars._drawn is not None:
        bars._drawn.refresh()
    return out.getvalue()


def test_a_download_has_a_bar_on_a_terminal_while_it_lasts() -> None:
    out = io.StringIO()
    bars = DownloadBars(console=Console(file=out, force_terminal=True, width=120))
    half = StartActivity(stage=Stage.DOWNLOADS, done_bytes=50 * 10**6, total_bytes=100 * 10**6)
    text = drawn(bars, out, {"prefill-0": half, "decode-0": StartActivity(stage=Stage.DOWNLOADS)})
    assert "prefill-0 downloads the model" in text
    assert "decode-0 downloads the model" in text
    assert "50.0/100.0 MB" in text
    bars.show({})
    assert bars._drawn is None


def test_a_plain_process_shows_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cluster.cli.plain.run")
    out = io.StringIO()
    process = SimpleNamespace(activity=StartActivity(stage=Stage.STARTS))

    async def start() -> None:
        console = Console(file=out, force_terminal=True, width=120)
        async with run.showing("worker-7", process, console):
            for stage in (Stage.DOWNLOADS, Stage.LOADS):
                process.activity = StartActivity(stage=stage, done_bytes=1, total_bytes=2)
                while stage not in caplog.messages:
                    await asyncio.sleep(0.01)

    asyncio.run(start())
    assert caplog.messages == ["downloads the model", "loads the model"]
    assert "worker-7 downloads the model" in out.getvalue()


def test_a_plain_worker_says_what_it_chose_before_it_has_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Loading:
        activity, chosen = StartActivity(stage=Stage.STARTS), ""

        def __init__(self, *_: object) -> None:
            pass

        async def start(self) -> str:
            self.chosen = "device cpu"
            while "device cpu" not in caplog.messages:
                await asyncio.sleep(0.01)
            raise ModelError("told in time")

    monkeypatch.setattr("cluster.worker.process.WorkerProcess", Loading)
    monkeypatch.setattr("cluster.worker.last_words.LastWords", lambda *_: None)
    caplog.set_level("INFO", "cluster.cli.plain.run")

    async def start() -> None:
        settings: Any = SimpleNamespace(name="w", role=Role.DECODE, host="h", port_range=None)
        await asyncio.wait_for(run.run_worker(settings, join=[], drain_s=0.0), timeout=30)

    with pytest.raises(ModelError, match="told in time"):
        asyncio.run(start())


def test_why_a_router_is_away_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = [(False, "refused"), (False, "refused"), (True, "gone"), (True, "gone"), (True, "")]

    async def register(*_: object) -> tuple[bool, str]:
        if not ends:
            raise ConfigError("enough")
        return ends.pop(0)

    monkeypatch.setattr(joins, "_register", register)
    monkeypatch.setattr(joins, "FIRST_RETRY_S", 0.0)
    with pytest.raises(ConfigError, match="enough"):
        asyncio.run(joins.stay_registered("here:1", worker_pb2.RegisterRequest(), NO_ACCESS))
    again = "trying again until it answers"
    assert caplog.messages == [
        f"router here:1: {why}; {again}" for why in ("refused", *2 * ["gone"])
    ]


def test_without_a_terminal_nothing_is_drawn() -> None:
    out = io.StringIO()
    bars = DownloadBars(console=Console(file=out))
    assert drawn(bars, out, {"p": StartActivity(stage=Stage.DOWNLOADS)}) == ""


# --- room ---------------------------------------------------------------------------------------


def test_who_is_not_among_those_that_ray_has_no_room_for_only_starts() -> None:
    assert not waits_for_room(CPU, [])
    assert not waits_for_room(CPU, [GPU, CPU | GPU, {"CPU": 2.0}])


def test_who_is_waits() -> None:
    assert waits_for_room(GPU, [CPU, GPU])
    there = {"CPU": 0.5000001, "mine": 1.0, "node:10.0.0.1": 0.001}
    assert waits_for_room({"CPU": 0.5, "mine": 1.0}, [there])
