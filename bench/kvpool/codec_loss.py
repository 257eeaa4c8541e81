"""What a codec loses: decoding on KV that came through slabs, against the KV that was computed.

Greedy, in bf16. Given the same text: how far logits and their distribution
move, and how often the next token is another. Left alone: how many tokens are the same until the
first that isn't.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from engine.core.sizing import EngineLimits
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, Tables
from kvpool.core.transfer.piece import Piece, cut_span
from kvpool.core.transfer.write import TokenSpan
from kvpool.memory.collate import read_slab, slab_bytes, write_slab
from kvrelay.types import RequestKey, Sampling

_TEXT = Path(__file__).parents[2] / "README.md"
_FINGERPRINT = "00" * 16
_BLOCK_SIZE = 16
_WANTED = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    prompts: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """`tokens` `[steps, prompts]`; `logits` `[steps, prompts, vocab]` are those before each."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Over all prompts and steps. `kl` in nats, of the exact distribution to the other."""

    codec: Codec
    most: float
    mean: float
    kl: float
    same_next: float
    same_until: float
    bytes_per_token: float


class Handoff:
    """Prompts are computed by one engine and handed over into other blocks of its pool, or to the
    engine that decodes."""

    def __init__(
        self, engine: Engine, prompts: torch.Tensor, load: Load, decoder: Engine | None = None
    ) -> None:
        """`decoder` None: the engine that computes."""
        self._engine, self._decoder, self._load = engine, decoder or engine, load
        self._prompts: list[list[int]] = prompts.tolist()
        self._sent_bytes = 0
        self.first = torch.tensor([self._prefill(number) for number in range(load.prompts)])

    def _prefill(self, number: int) -> int:
        """Token 0."""
        piece = self._slice(number, self._prompts[number], 0, self._tables(number))
        return int(self._engine.logits(StepBatch(slices=(piece,))).argmax())

    def _tables(self, number: int, *, received: bool = False) -> Tables:
        each = self._engine.layout.blocks_for(self._load.tokens)
        first = (number + received * self._load.prompts) * each
        blocks = tuple(BlockId(first + i) for i in range(each))
        return tuple(blocks for _ in self._engine.layout.groups)

    def _slice(self, number: int, ids: Sequence[int], start: int, tables: Tables) -> SequenceSlice:
        return SequenceSlice(
            key=RequestKey(str(number), 0),
            choice=0,
            token_ids=tuple(ids),
            start=start,
            tables=tables,
            samples=(_WANTED,),
        )

    def send(self, codec: Codec) -> float:
        """All prompts, to where they are decoded; bytes per token."""
        self._sent_bytes = 0
        for number in range(self._load.prompts):
            self._send_one(number, codec)
        return self._sent_bytes / (self._load.prompts * self._load.prompt_tokens)

    def _send_one(self, number: int, codec: Codec) -> None:
        memory, tokens = self._engine.memory, self._load.prompt_tokens
        span = TokenSpan(start=0, tokens=tokens, next_position=tokens)
        slab = torch.zeros(slab_bytes(memory.layout, tokens), dtype=torch.uint8)
        ours, theirs = self._tables(number), self._tables(number, received=True)
        for index, write in enumerate(cut_span(memory.layout, span, slab.numel())):
            piece, coded = Piece(span=span, index=index), write.encoded(codec)
            checks = {"fingerprint": _FINGERPRINT, "lease_id": 1, "window": slab}
            write_slab(memory, ours, piece, coded, **checks)  # type: ignore[arg-type]
            read_slab(self._decoder.memory, theirs, piece, coded, **checks)  # type: ignore[arg-type]
            self._sent_bytes += coded.nbytes

    def decode(self, *, received: bool, forced: torch.Tensor | None = None) -> Decoded:
        """On the blocks that were computed, or those received; greedy, or with the `forced` tokens
        of another run as the text."""
        last, steps = self.first, self._load.output_tokens
        tokens, logits = [], []
        for step in range(steps):
            found = self._step(last.tolist(), step, received)
            tokens.append(found.argmax(-1))
            logits.append(found)
            last = tokens[-1] if forced is None else forced[step]
        return Decoded(tokens=torch.stack(tokens), logits=torch.stack(logits))

    def _step(self, last: Sequence[int], step: int, received: bool) -> torch.Tensor:
        at = self._load.prompt_tokens + step
        slices = (
            self._slice(number, [token], at, self._tables(number, received=received))
            for number, token in enumerate(last)
        )
        engine = self._decoder if received else self._engine
        return engine.logits(StepBatch(slices=tuple(slices)))


def losses(engine: Engine, prompts: torch.Tensor, load: Load) -> tuple[float, list[Loss]]:
    """The standard deviation of the exact logits, and what each codec loses."""
    handoff = Handoff(engine, prompts, load)
    exact = handoff.decode(received=False)
    return float(exact.logits.std()), [_loss(handoff, exact, codec) for codec in Codec]


def _loss(handoff: Handoff, exact: Decoded, codec: Codec) -> Loss:
    nbytes = handoff.send(codec)
    forced = handoff.decode(received=True, forced=exact.tokens)
    free = handoff.decode(received=True)
    moved = (forced.logits - exact.logits).abs()
    log_p, log_q = exact.logits.log_softmax(-1), forced.logits.log_softmax(-1)
    return Loss(
        codec=codec,
        most=float(moved.max()),
        mean=float(moved.mean()),
        kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        same_next=float((forced.tokens == exact.tokens).float().mean()),
        same_until=float((free.tokens == exact.tokens).float().cumprod(0).mean()),
        bytes_per_token=nbytes,
    )


def rows(name: str, deviation: float, found: Sequence[Loss], load: Load) -> Iterator[Row]:
    method = (
        f"{load.prompts} prompts of {load.prompt_tokens} tokens, {load.output_tokens} greedy "
        "tokens, bf16; differences given the same text"
    )
    spread = "standard deviation of the logits"
    plain = next(loss for loss in found if loss.codec is Codec.NONE)
    for loss in found:
        what = f"{name}, {loss.codec}"
        most, mean = f"{what}: largest difference of a logit", f"{what}: mean difference of a logit"
        yield _row(most, loss.most, "", method, spread, deviation)
        yield _row(mean, loss.mean, "", method, spread, deviation)
        yield _row(f"{what}: Kullback-Leibler divergence", loss.kl, "nats", method)
        yield _row(f"{what}: next token the same", 100 * loss.same_next, "%", method)
        until = f"{what}: of {load.output_tokens} tokens, the same until one differs"
        yield _row(until, 100 * loss.same_until, "%", method)
        sent = f"{what}: bytes per token of KV"
        yield _row(sent, loss.bytes_per_token, "B", method, "codec none", plain.bytes_per_token)


def _row(
    name: str, value: float, unit: str, method: str, against: str = "", peer: float | None = None
) -> Row:
    return Row(
        name=name, value=value, unit=unit, method=method, against=against, against_value=peer
    )


def bundled_prompts(load: Load) -> torch.Tensor:
    """int64 `[prompts, tokens]`: pieces of this repository's README."""
    tokenizer = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(_TEXT.read_text()).ids)
    starts = torch.linspace(0, len(ids) - load.prompt_tokens, load.prompts).long()
    return torch.stack([ids[start : start + load.prompt_tokens] for start in starts])


def random_prompts(load: Load) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (load.prompts, load.prompt_tokens)
    return torch.randint(2, SMOLLM_135M.vocab_size, shape, generator=generator)


def bench_engine(
    path: Path,
    load: Load,
    *,
    dtype: str = "bfloat16",
    attention: str = "auto",
    compiled: bool = True,
) -> Engine:
    limits = EngineLimits(
        max_model_len=load.tokens,
        prefill_chunk_tokens=load.prompt_tokens,
        max_running_requests=load.prompts,
    )
    return load_engine(
        open_checkpoint(str(path)),
        device="cpu",
        dtype=dtype,
        block_size=_BLOCK_SIZE,
        blocks=2 * load.prompts * -(-load.tokens // _BLOCK_SIZE),
        limits=limits,
        attention=attention,
        compiled=compiled,
    )


def measure(load: Load) -> list[Row]:
    found = losses(bench_engine(checkpoint_path(), load), bundled_prompts(load), load)
    table = [*rows("bundled model", *found, load)]
    with tempfile.TemporaryDirectory() as folder:
        engine = bench_engine(write_random_llama(Path(folder), SMOLLM_135M), load)
        found = losses(engine, random_prompts(load), load)
    return [*table, *rows("random SmolLM-135M", *found, load)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=200)
    args = parser.parse_args()
    load = Load(
        prompts=args.prompts, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens
    )
    table = measure(load)
    print_table("What codecs lose", table)
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
