"""Any input, for as many cases as one likes: `make soak-inputs`.

python -m tests.inputs.soak --cases 100000 [--seed 1]

Each round draws new cases of every kind from a new seed and sends them to one router. The first
that crashes anything is printed, made as small as it can be, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvrelay.v1 import inference_pb2_grpc
from tests.inputs import cases
from tests.inputs.serving import serving
from tests.inputs.strategies import generate_requests, headers, lines, prompt_parts, requests

ROUND = {"http": 500, "lines": 150, "grpc": 250, "parts": 100}
"""# kind |-> its cases of one round"""


def _post(client: httpx.Client, request: tuple[str, bytes], headers: dict[bytes, bytes]) -> None:
    cases.post(client, *request, headers)


def checks(
    client: httpx.Client, stub: inference_pb2_grpc.InferenceStub
) -> dict[str, tuple[st.SearchStrategy[object], Callable[..., None]]]:
    """# kind |-> what is sent, and how"""
    return {
        "http": (st.tuples(requests, headers), lambda one: _post(client, *one)),
        "lines": (lines, lambda body: cases.post(client, "/v1/completions/stream", body, {})),
        "grpc": (generate_requests, lambda message: cases.generate(stub, message)),
        "parts": (prompt_parts, lambda parts: cases.generate_parts(stub, parts)),
    }


def run_round(
    number: int, found: dict[str, tuple[st.SearchStrategy[object], Callable[..., None]]]
) -> None:
    for kind, (strategy, send) in found.items():
        plain = settings(
            max_examples=ROUND[kind],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(plain(given(strategy)(send)))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    done, number, began_s = 0, options.seed, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        client = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
        channel = grpc.insecure_channel(server.grpc_address)
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with client, channel:
            while done < options.cases:
                run_round(number, checks(client, stub))
                done, number = done + sum(ROUND.values()), number + 1
                print(f"{done} cases in {time.monotonic() - began_s:.0f} s, no crash", flush=True)
        assert not server.dispatcher.running, "a request is still running"


if __name__ == "__main__":
    main()
