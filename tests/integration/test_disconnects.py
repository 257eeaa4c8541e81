"""A client that goes away at each moment of a request's life: the work stops, the blocks return.

The moment is caught by a hook on the router's ledger, in which the client's socket is closed.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from router.ledger import Ledger
from tests.integration.split_kit import (
    Cluster,
    wait_until,
)

PROMPT = list(range(2, 302))  # five chunks
TOKENS = 600
MOMENTS = [
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
]


def open_request(split: Cluster, **fields: Any) -> socket.socket:
    """A raw socket that has sent a whole request and read nothing."""
    body = {"model": "test-model", "prompt": PROMPT, "ignore_eos": True, **fields}
    payload = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", split.router.address.http_port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    client.sendall(head.encode() + payload)
    return client


def generated_tokens(split: Cluster) -> int:
    views = split.router.process.dispatcher.core.workers.values()
    return sum(view.counters.generated_tokens for view in views)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_work_stops_and_blocks_return(
    split: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str, stream: bool
) -> None:
    before = generated_tokens(split)
    gone = threading.Event()
    clients: list[socket.socket] = []
    ready = threading.Event()
    mark = Ledger.mark

    def hooked(self: Ledger, name: str, at_s: float) -> None:
        mark(self, name, at_s)
        if name == moment and not gone.is_set():
            ready.wait()
            clients[0].close()
            gone.set()

    monkeypatch.setattr(Ledger, "mark", hooked)
    clients.append(open_request(split, max_tokens=TOKENS, temperature=0, stream=stream))
    ready.set()
    assert gone.wait(30), f"{moment} never came"
    wait_until(lambda: not split.router.process.dispatcher.running_requests(), "it is aborted")
    split.assert_clean()
    assert held_blocks(split) == 0
    assert generated_tokens(split) - before < TOKENS / 2


def held_blocks(split: Cluster) -> int:
    """Counted from the holders' own lists, not from the pool's free count."""
    return sum(len(held["block_ids"]) for worker in split.kv() for held in worker["held"])


def test_gone_before_it_is_read(split: Cluster) -> None:
    open_request(split, max_tokens=TOKENS, stream=True).close()
    wait_until(lambda: not split.router.process.dispatcher.running_requests(), "it is aborted")
    split.assert_clean()
