"""Two ends, connected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from bench.transfer.receiver import receiver_in_thread
from bench.transfer.sender import PATIENCE_S, Sender
from bench.transfer.shape import Shape


@contextmanager
def link(scheme: str, shape: Shape) -> Iterator[Sender]:
    """Two ends, in two processes but for loopback."""
    with _receiver(scheme, shape) as address:
        sender = Sender(scheme, shape, address)
        try:
            yield sender
        finally:
            sender.endpoint.close()


@contextmanager
def _receiver(scheme: str, shape: Shape) -> Iterator[str]:
    """Its address; it ends when its peer is gone."""
    if scheme == "loopback":
        address, join = receiver_in_thread(scheme, shape)
        yield address
        join()
        return
    command = [sys.executable, "-m", "bench.transfer.receiver", scheme]
    command.append(json.dumps(asdict(shape)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (line.strip() for line in process.stdout)  # UCX may warn before it
            yield next((line for line in lines if line.startswith(f"{scheme}:")), "")
            process.wait(timeout=PATIENCE_S)
        finally:
            process.kill()
