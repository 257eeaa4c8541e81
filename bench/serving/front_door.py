"""What the front door costs: API keys, TLS, and a structured answer, in tokens/s over HTTP.

One worker of role both serves three routers: an open one, one that asks for an API key, and one
that asks for it over TLS. All are asked in turn, so that whatever else the machine does hits them
alike. Each request opens a connection of its own, so each pays for a whole TLS handshake. Client,
routers and worker share two cores: the client's own part of TLS is in the figures too.
"""

from __future__ import annotations

import argparse
import json
import random
import ssl
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trustme
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.engine.speed import Load
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Reading, Row, interleave, print_table, write_json
from bench.serving.http_load import all_at_once, send
from bench.serving.plain_cluster import TLS, WorkerPlan, plain_cluster
from bench.serving.serve import MODEL, SETTINGS

AT_MOST_3_PERCENT, AT_MOST_5_PERCENT = 0.97, 0.95
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
"""Never complete within an answer of the benchmark, so every answer has all its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One router: its port, and what its clients need."""

    port: int
    key: str = ""
    tls: ssl.SSLContext | None = None

    def tokens_per_s(self, load: Load, prompts: list[list[int]], **body: object) -> float:
        send_one = partial(send, self.port, key=self.key, tls=self.tls, **body)
        began_s = time.perf_counter()
        all_at_once(send_one, prompts, load.output_tokens)
        return load.total_output_tokens / (time.perf_counter() - began_s)


def write_vocabulary(folder: Path, size: int) -> None:
    """A tokenizer with as many tokens as the model has logits: byte-level BPE of random words."""
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = ("".join(rng.choices(string.ascii_lowercase, k=7)) for _ in range(size))
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    if tokenizer.get_vocab_size() != size:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens, {size} are wanted")
    tokenizer.save(str(folder / "tokenizer.json"))


def make_key(file: Path) -> str:
    """A key of a new file, by the command that users have."""
    command = [sys.executable, "-m", "cluster", "keys", "add", "--file", str(file)]
    options = ["--tenant", "bench", "--format", "json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["key"])


@contextmanager
def doors(model: Path, folder: Path) -> Iterator[dict[str, Door]]:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, private = folder / "chain.pem", folder / "key.pem"
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(str(chain), append=True)
    certificate.private_key_pem.write_to_path(str(private))
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    key = make_key(folder / "keys.json")
    with_keys = (f"router.api_keys={folder / 'keys.json'}",)
    with_tls = (f"{TLS}.certificate={chain}", f"{TLS}.key={private}")
    workers = [WorkerPlan(role="both", cores=(0, 1))]
    each_router = [(), with_keys, (*with_keys, *with_tls)]
    with plain_cluster(model, workers, SETTINGS, each_router=each_router) as cluster:
        open_, keyed, safe = cluster.http_ports
        yield {
            "open": Door(port=open_),
            "keys": Door(port=keyed, key=key),
            "keys and TLS": Door(port=safe, key=key, tls=trusted),
        }


def measure(load: Load, repeats: int, only: str | None) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        model = write_random_llama(Path(name) / "model", SMOLLM_135M)
        write_vocabulary(model, SMOLLM_135M.vocab_size)
        with doors(model, Path(name)) as found:
            prompts = load.prompts().tolist()
            rows: list[Row] = []
            if only in (None, "doors"):
                rows += _door_rows(load, prompts, found, repeats)
            if only in (None, "structured"):
                rows += _structured_rows(load, prompts, found["open"], repeats)
            return rows


def _door_rows(
    load: Load, prompts: list[list[int]], found: dict[str, Door], repeats: int
) -> list[Row]:
    candidates: dict[str, Callable[[], float]] = {
        name: partial(door.tokens_per_s, load, prompts) for name, door in found.items()
    }
    readings = _measured(candidates, repeats)
    against = readings.pop("open")
    return [
        _row(f"with {name}", "neither", reading, against, load, AT_MOST_3_PERCENT)
        for name, reading in readings.items()
    ]


def _structured_rows(load: Load, prompts: list[list[int]], door: Door, repeats: int) -> list[Row]:
    asked = {"structured_outputs": {"json": SCHEMA}}
    readings = _measured(
        {
            "free": partial(door.tokens_per_s, load, prompts),
            "structured": partial(door.tokens_per_s, load, prompts, **asked),
        },
        repeats,
    )
    structured, free = readings["structured"], readings["free"]
    return [_row("by a JSON schema", "free", structured, free, load, AT_MOST_5_PERCENT)]


def _measured(candidates: dict[str, Callable[[], float]], repeats: int) -> dict[str, Reading]:
    for warm_up in candidates.values():
        warm_up()
    return interleave(candidates, repeats=repeats)


def _row(name: str, other: str, reading: Reading, against: Reading, load: Load, goal: float) -> Row:
    pairs = [a / b for a, b in zip(reading.values, against.values, strict=True)]
    each = Reading(values=tuple(pairs))
    shape = f"{load.requests} x ({load.prompt_tokens} in, {load.output_tokens} out)"
    return Row(
        name=f"output tokens/s {name}, {shape}",
        value=reading.median,
        unit="tokens/s",
        against=other,
        against_value=against.median,
        goal=goal,
        method=f"{MODEL}, 2 threads, interleaved, one worker of role both",
        spread=f"{reading.spread()}; ratio of each pair: {each.median:.4f}, {each.spread()}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--only", choices=["doors", "structured"], help="measure this part alone")
    args = parser.parse_args()
    load = Load(
        requests=args.streams,
        prompt_tokens=512,
        output_tokens=args.output_tokens,
        chunk_tokens=512,
    )
    rows = measure(load, args.repeats, args.only)
    print_table("The front door", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
