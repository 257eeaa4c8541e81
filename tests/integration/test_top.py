"""Admin.Watch and `kvrelay top` on real processes: a flip and a drain as they happen, and routers
that go."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from cluster.process.admin import NotPossible, drain, flip, open_watch
from cluster.watch.follow import followed
from cluster.watch.latest import LatestReports
from kvrelay.access.values import Access
from kvrelay.types import Role
from kvrelay.v1 import admin_pb2 as pb
from tests.access import ACCESS, OTHER_TOKEN, token_file
from tests.integration.plain_kit import KVRELAY
from tests.integration.split_kit import (
    RouterThread,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import ask_all, prompts

MOST_REPORTS = 300
Workers = dict[str, pb.WatchedWorker]


def until_told(
    reports: Iterator[pb.WatchReport], found: Callable[[Workers], bool]
) -> pb.WatchReport:
    """The first report of which this holds."""
    for report, _ in zip(reports, range(MOST_REPORTS), strict=False):
        if found({one.info.name: one for one in report.workers}):
            return report
    raise AssertionError(f"not told: {report}")


def top(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [KVRELAY, "top", "--address", address, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_watch_shows_a_flip_and_a_drain(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
    """The worker that drains ends its answer first, since no other one decodes."""
    workers = [(hosts[0], worker_settings("stays", Role.PREFILL, llama))]
    with running_cluster(llama, workers) as cluster, ThreadPoolExecutor(1) as pool:
        address = cluster.add(hosts[1], worker_settings("leaves", Role.BOTH, llama))
        with open_watch(cluster.internal_grpc, 0.1, ACCESS) as reports:
            first = next(reports)
            assert {one.info.name for one in first.workers} == {"stays", "leaves"}
            assert not first.not_ready
            assert not first.leaving
            flip("leaves", Role.DECODE, cluster.internal_grpc, ACCESS)
            flipped = until_told(reports, lambda w: w["leaves"].info.role == "decode")
            (found,) = [one for one in flipped.workers if one.info.name == "leaves"]
            assert (found.role_epoch, found.state) == (1, pb.WORKER_STATE_READY)
            answer = pool.submit(ask_all, cluster, prompts(1, 50), max_tokens=900)
            busy = until_told(reports, lambda w: w["leaves"].info.running == 1)
            assert busy.open_requests == 1
            assert [(t.name, t.open_requests, t.admitted) for t in busy.tiers] == [
                ("default", 1, 1)
            ]
            asked = pb.ChangeRequest(drain={"name": "leaves", "replace": True}, drain_s=60.0)
            drain(asked, cluster.internal_grpc, ACCESS, wait=False)
            until_told(reports, lambda w: w["leaves"].state == pb.WORKER_STATE_DRAINING)
            after = until_told(reports, lambda w: "leaves" not in w)
            assert after.open_requests == 0
            assert len(answer.result()[0]) == 900
        hosts[1].stop(address)
        cluster.router.call(cluster.router.process.remove_worker(address))


def test_clients_that_go_leave_nothing(llama: Path) -> None:
    router = RouterThread(llama)
    try:
        internal = f"127.0.0.1:{router.address.internal.grpc}"
        watches = router.process._servers._watches
        with open_watch(internal, 3600.0, ACCESS) as reports:
            assert next(reports).not_ready == "no worker has joined yet"
            assert watches.open == 1
        wait_until(lambda: watches.open == 0, "the stream is closed")
        told = "interval_s is nan: give 0.1 to 3600 s"
        with (
            pytest.raises(NotPossible, match=told),
            open_watch(internal, float("nan"), ACCESS) as r,
        ):
            next(r)
    finally:
        router.close()


def test_a_router_that_stops_ends_its_streams(llama: Path) -> None:
    """And who follows it says so, while another router is still heard."""
    goes, stays = RouterThread(llama), RouterThread(llama)
    addresses = [f"127.0.0.1:{one.address.internal.grpc}" for one in (goes, stays)]
    try:
        with (
            followed(addresses, 0.1, ACCESS) as following,
            open_watch(addresses[0], 3600.0, ACCESS) as reports,
        ):
            next(reports)
            wait_until(lambda: all(one.report for one in following.now()), "both are heard")
            goes.close()
            assert list(reports) == []
            wait_until(lambda: bool(following.now()[0].trouble), "its end is told")
            gone, other = following.now()
            assert gone.report is None
            assert other.report is not None
            assert not other.trouble
    finally:
        stays.close()


def test_the_latest_report_of_a_router_comes_by_one_call_and_stays_when_it_is_lost(
    llama: Path,
) -> None:
    goes, stays = RouterThread(llama), RouterThread(llama)
    addresses = [f"127.0.0.1:{one.address.internal.grpc}" for one in (goes, stays)]
    watches = stays.process._servers._watches
    latest = LatestReports(ACCESS)
    try:
        wait_until(lambda: all(one.report for one in latest.of(addresses)), "both are heard")
        first = latest.of(addresses)
        wait_until(
            lambda: latest.of(addresses)[1].heard_s >= first[1].heard_s + 1.0, "newer ones come"
        )
        assert watches.open == 1, "by the same call"
        goes.close()
        wait_until(lambda: bool(latest.of(addresses)[0].trouble), "its end is told")
        gone, other = latest.of(addresses)
        assert gone.report is not None and not other.trouble
        wait_until(
            lambda: latest.of(addresses)[1].heard_s > gone.heard_s, "the other one is heard later"
        )
        assert latest.of(addresses)[0].heard_s == gone.heard_s
        assert [one.address for one in latest.of(addresses[:1])] == addresses[:1]
        wait_until(lambda: watches.open == 0, "who is asked for no more is let go")
        assert [one.report for one in latest.of(addresses[1:])] == [None]
        wait_until(lambda: latest.of(addresses[1:])[0].report is not None, "it is heard anew")
    finally:
        latest.close()
        stays.close()
    assert not [one.name for one in threading.enumerate() if "follow" in one.name]


def test_a_router_that_refuses_is_asked_again(llama: Path) -> None:
    router = RouterThread(llama)
    address = f"127.0.0.1:{router.address.internal.grpc}"
    latest = LatestReports(Access(token=OTHER_TOKEN))
    try:
        for _ in range(2):
            wait_until(lambda: "token" in latest.of([address])[0].trouble, "why is told")
        assert latest.of([address])[0].report is None
    finally:
        latest.close()
        router.close()


def test_top_as_a_user_runs_it(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, llama)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, llama)),
    ]
    with running_cluster(llama, workers) as cluster:
        shown = top(cluster.internal_grpc, "--once")
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith(f"{cluster.internal_grpc}: ready, 0 requests open")
        rows = [line.split()[:3] for line in lines if " -> " not in line]
        assert ["decode-0", "decode", "ready"] in rows
        assert ["prefill-0", "prefill", "ready"] in rows
        (told,) = json.loads(top(cluster.internal_grpc, "--once", "--json").stdout)["routers"]
        assert (told["address"], told["trouble"]) == (cluster.internal_grpc, "")
        assert {one["info"]["name"] for one in told["report"]["workers"]} == {
            "prefill-0",
            "decode-0",
        }
        address = cluster.internal_grpc
        public = top(cluster.grpc_address, "--once")
        assert public.returncode == 2
        assert "not the internal gRPC address" in public.stderr
    gone = top(address, "--once")
    assert gone.returncode == 2
    assert "no router answers" in gone.stderr


def test_top_in_a_terminal_until_ctrl_c(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
    """It shows what is offered once it has heard twice, and leaves the terminal as it was."""
    workers = [(hosts[0], worker_settings("both-0", Role.BOTH, llama))]
    with running_cluster(llama, workers) as cluster, ThreadPoolExecutor(1) as pool:
        command = (KVRELAY, "top", "--address", cluster.internal_grpc, "--interval", "0.1")
        with Terminal(*command) as terminal:
            wait_until(lambda: "both-0" in terminal.text(), "its worker is shown")
            answer = pool.submit(ask_all, cluster, prompts(1, 50), max_tokens=300)
            wait_until(lambda: _offered(terminal.text()), "what is offered is shown")
            answer.result()
            assert ALTERNATE in terminal.seen
            terminal.press(CTRL_C)
            assert terminal.process.wait(30) == 0
            wait_until(lambda: MAIN in terminal.seen, "the terminal is as it was")
    assert "Traceback" not in terminal.text()


ALTERNATE, MAIN, CTRL_C = "\x1b[?1049h", "\x1b[?1049l", "\x03"


def _offered(text: str) -> bool:
    """Of the tier, after its three counts: tokens of prompts and of answers, each second."""
    return bool(re.search(r"default +\d+ +[1-9]\d* +\d+ +[1-9]\S* +[1-9]", text))


class Terminal:
    """A command in a terminal of its own, of 80 columns. `seen`: all that it has written there."""

    def __init__(self, *command: str | Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.seen = ""
        self._reading = Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        with suppress(OSError):  # nobody has it open any more
            while got := os.read(self._master, 65536):
                self.seen += got.decode(errors="replace")

    def text(self) -> str:
        """Without colours and cursor moves."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen)

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        os.close(self._master)


def test_another_token_is_refused(llama: Path, tmp_path: Path) -> None:
    router = RouterThread(llama)
    try:
        address = f"127.0.0.1:{router.address.internal.grpc}"
        refused = top(address, "--once", "--token-file", token_file(tmp_path))
        assert refused.returncode == 2
        assert "--token-file" in refused.stderr
    finally:
        router.close()
