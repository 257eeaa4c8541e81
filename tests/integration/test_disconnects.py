"""A client that goes away at each moment of a request's life: the work stops, the blocks return.

The moment is caught by a hook on the event, in which the client's socket is closed.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.messages import Prefill, Released, Reserve, ReserveRefused
from router.core.core import RouterCore
from router.core.events import Deliver, Send, WorkerSaid
from router.core.request import Ledger
from router.live.dispatcher import WorkerDispatcher, WorkerGeneration
from router.text.service import TextService
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    split_workers,
    wait_until,
)

PROMPT = list(range(2, 302))  # five chunks
TOKENS = 7000
MOMENTS = [
    "received",
    "tokenized",
    "admitted",
    "placed",
    "reserved",
    "prefill_received",
    "prefill_started",
    "prefill_chunk",
    "first_token",
    "first_token_received",
    "handoff_committed",
    "decode_joined",
    "last_token_received",
    "finished",
]


@pytest.fixture(scope="module")
def split(long_llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    with running_cluster(long_llama, split_workers(hosts, long_llama)) as cluster:
        yield cluster


class Watch:
    """Sees what the router's core is told and says. `at` closes the client at one moment.

    It keeps its own count of what workers hold: a request is held from the message that asks for
    it until that worker says Released (or refuses).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone = threading.Event()
        self.held: set[tuple[str, str]] = set()  # worker, request
        self._client: socket.socket | None = None
        self._armed = threading.Event()
        self._moment = ""
        self._hook_core(monkeypatch)
        self._hook_moments(monkeypatch)

    def at(self, moment: str, client: socket.socket) -> None:
        self._moment, self._client = moment, client
        self._armed.set()

    def happened(self, moment: str) -> None:
        self._armed.wait(30)
        if moment == self._moment and not self.gone.is_set():
            assert self._client is not None
            self._client.close()
            self.gone.set()

    def _hook_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handle = RouterCore.handle

        def hooked(core: RouterCore, event: Any, now_s: float) -> list[Any]:
            if isinstance(event, WorkerSaid):
                for said in event.events:
                    if isinstance(said, Released | ReserveRefused):
                        self.held.discard((event.incarnation, str(said.key)))
            commands = handle(core, event, now_s)
            for command in commands:
                if isinstance(command, Send) and isinstance(command.message, Reserve | Prefill):
                    self.held.add((command.worker, str(command.message.spec.key)))
            if any(isinstance(command, Deliver) and command.done for command in commands):
                self.happened("finished")
            return commands

        monkeypatch.setattr(RouterCore, "handle", hooked)

    def _hook_moments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def before(owner: Any, method: str, moment: str) -> None:
            original = getattr(owner, method)

            def hooked(*args: Any, **kwargs: Any) -> Any:
                self.happened(moment)
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, method, hooked)

        before(TextService, "start", "received")
        before(WorkerDispatcher, "submit", "tokenized")
        before(WorkerGeneration, "__aiter__", "admitted")
        mark = Ledger.mark

        def marked(ledger: Ledger, name: str, at_s: float) -> None:
            mark(ledger, name, at_s)
            self.happened(name)

        monkeypatch.setattr(Ledger, "mark", marked)


def open_request(split: Cluster, **fields: Any) -> socket.socket:
    """A raw socket that has sent a whole request and read nothing."""
    body = {"model": "test-model", "prompt": PROMPT, "ignore_eos": True, **fields}
    payload = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", split.router.address.public.http))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    client.sendall(head.encode() + payload)
    return client


def steps(split: Cluster) -> list[int]:
    """Of each worker, as far as it has told."""
    workers = split.router.process.dispatcher.core.state.workers
    return split.router.read(lambda: [view.counters.steps for view in workers.values()])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_work_stops_and_blocks_return(
    split: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str, stream: bool
) -> None:
    watch, before = Watch(monkeypatch), steps(split)
    tokens = 3 if moment in ("last_token_received", "finished") else TOKENS
    watch.at(moment, open_request(split, max_tokens=tokens, temperature=0, stream=stream))
    assert watch.gone.wait(30), f"{moment} never came"
    dispatcher = split.router.process.dispatcher
    wait_until(lambda: not dispatcher.running_requests(), "it is aborted")
    split.assert_clean()
    wait_until(lambda: not watch.held, f"every worker has released it: {watch.held}")
    taken = [after - begun for after, begun in zip(steps(split), before, strict=True)]
    # That no step is begun once the abort is there the schedulers' unit tests show.
    assert max(taken) < TOKENS // 2, "it went on and on"


def test_gone_before_it_is_read(split: Cluster) -> None:
    open_request(split, max_tokens=TOKENS, stream=True).close()
    wait_until(lambda: not split.router.process.dispatcher.running_requests(), "it is aborted")
    split.assert_clean()
