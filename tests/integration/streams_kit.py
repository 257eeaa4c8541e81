"""Streams that run while something happens to the cluster, and when each token came."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from tests.integration.split_kit import PATIENCE_S, Cluster, wait_until


@dataclass
class Stream:
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def longest_pause_s(self) -> float:
        """Between two tokens."""
        return max((b - a for a, b in zip(self.came_s, self.came_s[1:], strict=False)), default=0.0)


class Streams:
    """Greedy completions of `tokens` tokens, all at once."""

    def __init__(self, cluster: Cluster, prompts: Sequence[list[int]], tokens: int) -> None:
        self.streams = [Stream(prompt) for prompt in prompts]
        self._cluster, self._tokens = cluster, tokens
        self._threads = [threading.Thread(target=self._run, args=(s,)) for s in self.streams]

    def wait_for(self, tokens: int) -> None:
        """Until each stream has this many."""
        wait_until(lambda: all(len(s.token_ids) >= tokens for s in self.streams), "streams run")

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when all have ended."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a stream never ends"

    def _run(self, stream: Stream) -> None:
        try:
            self._follow(stream)
        except Exception as error:
            stream.error = repr(error)

    def _follow(self, stream: Stream) -> None:
        body = {"model": "test-model", "prompt": stream.prompt, "max_tokens": self._tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with self._cluster.http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk or "choices" not in chunk:
                    raise RuntimeError(line)
                found = chunk["choices"][0].get("token_ids") or []
                stream.token_ids += found
                stream.came_s += [time.monotonic()] * len(found)
