"""One prefill and one decode worker: whichever is killed, the other one loses nothing."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.types import Role
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    split_workers,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import ask_all, load, prompts, tokens_of
from tests.reference import assert_same_tokens, generate_reference

STREAMS, LATER, TOKENS = 6, 3, 120
SOON_S = 10.0
"""A restart would take longer where it counts; here nobody restarts the worker."""


class Stream:
    """What one client has got so far, and the longest it waited for more."""

    def __init__(self, cluster: Cluster, prompt: list[int]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.longest_pause_s = 0.0
        self._http = cluster.http

    def run(self) -> None:
        body = {
            "model": "test-model",
            "prompt": self.prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        last_s = time.monotonic()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                for _, ids in tokens_of(line):
                    now_s = time.monotonic()
                    self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
                    last_s = now_s
                    self.tokens += ids


@pytest.mark.parametrize("gone", [Role.PREFILL, Role.DECODE])
def test_a_pair_loses_nothing(llama: Path, gone: Role) -> None:
    """Streams decode, and one long prompt after the other is on its way when the worker is
    killed. Requests that come later are served too, and split again once it is back."""
    asked = prompts(STREAMS, 200)
    with WorkerHost() as prefill, WorkerHost() as decode, WorkerHost() as spare:
        workers = split_workers((prefill, decode), llama)
        doomed = prefill if gone is Role.PREFILL else decode
        with running_cluster(llama, workers) as cluster, ThreadPoolExecutor(2 * STREAMS) as pool:
            streams = [Stream(cluster, prompt) for prompt in asked]
            running = [pool.submit(stream.run) for stream in streams]
            wait_until(lambda: all(len(one.tokens) >= 5 for one in streams), "all decode")
            more = [Stream(cluster, prompt) for prompt in prompts(STREAMS, 700, seed=9)]
            running += [pool.submit(stream.run) for stream in more]
            wait_until(lambda: any(one.tokens for one in more), "some of the others decode too")
            os.kill(doomed.pid, signal.SIGKILL)
            for one in running:
                one.result()
            later = ask_all(cluster, prompts(LATER, 100, seed=4))
            address = spare.start(worker_settings("back", gone, llama))
            cluster.join(address, "back")
            split = ask_all(cluster, prompts(LATER, 100, seed=5))
            views = cluster.router.process.dispatcher.core.state.workers.values()
            back = next(view for view in views if view.hello.name == "back")
            wait_until(lambda: back.counters.steps > 0, "it has work again")
        reference = load(llama)
    for stream in (*streams, *more):
        expected = generate_reference(reference, stream.prompt, tokens=TOKENS)
        assert_same_tokens(expected, stream.tokens)
        assert stream.longest_pause_s < SOON_S
    for seed, found in ((4, later), (5, split)):
        for prompt, ids in zip(prompts(LATER, 100, seed=seed), found, strict=True):
            assert_same_tokens(generate_reference(reference, prompt, tokens=len(ids)), ids)


def test_a_request_goes_on_where_its_kv_lies(llama: Path) -> None:
    """The next turn of a conversation that the decode worker has. Its prefill worker dies before
    it computes anything, and the only other one has nothing of it: what nobody has is computed,
    by the decode worker, and no token more."""
    (prompt,) = prompts(1, 200)
    with WorkerHost() as doomed, WorkerHost() as decode, WorkerHost() as other:
        with (
            running_cluster(llama, split_workers((doomed, decode), llama)) as cluster,
            ThreadPoolExecutor(1) as pool,
        ):
            views = cluster.router.process.dispatcher.core.state.workers
            (answer,) = ask_all(cluster, [prompt])
            turn = [*prompt, *answer, *range(5, 25)]
            os.kill(doomed.pid, signal.SIGSTOP)
            asked = pool.submit(ask_all, cluster, [turn])
            requests = cluster.router.process.dispatcher.core.state.requests
            wait_until(lambda: any(one.admitted for one in [*requests.values()]), "it is admitted")
            cluster.add(other, worker_settings("other", Role.PREFILL, llama))
            os.kill(doomed.pid, signal.SIGKILL)
            (found,) = asked.result()
            cluster.assert_clean()
            computed = {v.hello.name: v.counters.prompt_tokens for v in views.values()}
        assert_same_tokens(generate_reference(load(llama), turn, tokens=len(found)), found)
    cached = (len(prompt) + len(answer) - 1) // 16 * 16
    assert computed == {"other": 0, "decode-0": len(turn) - cached}
