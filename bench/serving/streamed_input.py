"""From the last part of a prompt to its first token, beside the same prompt sent whole then.

A small random Llama behind one prefill and one decode worker, a core each. The prompt's token ids
arrive evenly over some seconds, in ten parts a second. The goal is the last chunk of prefill and
the handoff: what such a prompt takes of which all but one chunk is cached, sent whole to the same
idle cluster. Beside it, the first chunk, which has no tokens before it to attend to.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import LlamaConfig

from bench.models import write_random_llama
from bench.report import Reading, Row, print_table, write_json
from bench.serving.plain_cluster import HANDED_OVER, WorkerPlan, plain_cluster
from kvrelay import Client

CHUNK_TOKENS = 512
PARTS_PER_S = 10
CASES = [(tokens, seconds) for tokens in (2000, 8000, 32_000) for seconds in (2.0, 10.0)]
LONG_CONTEXT = LlamaConfig(
    vocab_size=32_000,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=0,
)
"""So small that a core computes 32,000 tokens in less than the time in which they arrive."""
PLANS = [WorkerPlan(role="prefill", cores=(0,)), WorkerPlan(role="decode", cores=(1,))]
SETTINGS = (f"scheduler.prefill_chunk_tokens={CHUNK_TOKENS}",)
METHOD = "token ids over gRPC, one request at a time, 4 tokens out, medians"


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 32_000) for _ in range(tokens)]


class Arriving:
    """The prompt in equal parts; `ended_s` is when the last one was given."""

    def __init__(self, prompt: Sequence[int], seconds: float) -> None:
        self.ended_s = 0.0
        self._prompt, self._seconds = prompt, seconds

    def __iter__(self) -> Iterator[Sequence[int]]:
        parts = max(1, round(self._seconds * PARTS_PER_S))
        begun_s, length = time.perf_counter(), len(self._prompt)
        for number in range(parts):
            due_s = begun_s + self._seconds * (number + 1) / parts
            time.sleep(max(0.0, due_s - time.perf_counter()))
            self.ended_s = time.perf_counter()
            yield self._prompt[length * number // parts : length * (number + 1) // parts]


def _in_parts_ms(client: Client, prompt: Sequence[int], seconds: float) -> float:
    parts = Arriving(prompt, seconds)
    with client.stream_input(parts, max_tokens=4, ignore_eos=True) as stream:
        next(stream)
        first_s = time.perf_counter()
        list(stream)
    return 1000 * (first_s - parts.ended_s)


def _whole_ms(client: Client, prompt: Sequence[int]) -> float:
    begun_s = time.perf_counter()
    with client.stream(prompt, max_tokens=4, ignore_eos=True) as stream:
        next(stream)
        first_s = time.perf_counter()
        list(stream)
    return 1000 * (first_s - begun_s)


def measure(client: Client, tokens: int, seconds: float, repeats: int, seed: int) -> list[Row]:
    """In turn: in parts, whole, the last chunk of it with another end, and a first chunk."""
    parts, whole, last, first = [], [], [], []
    for number in range(repeats):
        parts.append(_in_parts_ms(client, _prompt(seed + 4 * number, tokens), seconds))
        cached = _prompt(seed + 4 * number + 1, tokens)
        end = _prompt(seed + 4 * number + 2, CHUNK_TOKENS)
        whole.append(_whole_ms(client, cached))
        last.append(_whole_ms(client, cached[:-CHUNK_TOKENS] + end))
        first.append(_whole_ms(client, _prompt(seed + 4 * number + 3, CHUNK_TOKENS)))
    found, name = Reading(values=tuple(parts)), f"{tokens} tokens over {seconds:g} s"
    return [
        _row(name, found, "the last chunk and the handoff", last, 1.0),
        _row(name, found, "a first chunk and the handoff", first, None),
        _row(name, found, "sent whole then", whole, None),
    ]


def _row(name: str, found: Reading, against: str, ms: list[float], goal: float | None) -> Row:
    return Row(
        name=name,
        value=found.median,
        unit="ms",
        against=against,
        against_value=Reading(values=tuple(ms)).median,
        goal=goal,
        lower_is_better=True,
        method=METHOD,
        spread=found.spread(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_llama(Path(scratch), LONG_CONTEXT)
        with (
            plain_cluster(folder, PLANS, SETTINGS, router_settings=HANDED_OVER) as cluster,
            Client(f"127.0.0.1:{cluster.grpc_port}") as client,
        ):
            _whole_ms(client, _prompt(0, CHUNK_TOKENS))
            for number, (tokens, seconds) in enumerate(CASES):
                seed = 1000 * (number + 1)
                rows += measure(client, tokens, seconds, arguments.repeats, seed)
    print_table("Prompts that arrive in parts: from the last part to the first token", rows)
    if arguments.json is not None:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
