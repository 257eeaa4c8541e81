"""Keeps structured output within its grammar: which ids each choice may draw next.

A choice's place in its grammar is a function of the ids that it has emitted. It is kept from step
to step, and found anew by replay where the history is another one than expected: after a failover,
a move, a preemption, or where the choices of a prompt have parted. Runs in the worker.

The matcher is llguidance's. It walks the vocabulary as a trie of bytes (Earley's parser over a
lexer of regular expressions' derivatives; guidance-ai/llguidance, docs/toktrie.md).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.core.step import SampleRequest, SequenceSlice
from engine.device.first_use import FIRST_USES
from engine.device.streams import send
from engine.sampling.native_draw import host_draw
from kvrelay.types import RequestKey

log = logging.getLogger(__name__)

Bits = NDArray[np.int32]
"""`[rows, words]`: bit i of a row, the lowest first, is id i."""

MOST_COMPILED = 64
"""Grammars that are kept for later requests: agents send the same ones again and again."""
KEPT_STEPS = 64
"""A choice that was in none of this many masked steps is forgotten; it can be replayed."""
STACK_BYTES = 64 << 20
"""Of the thread that compiles. llguidance follows a grammar's rules by recursion; routers check
grammars with less (`router.text.grammar.check`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Of the rows of a step's logits that a grammar constrains. `exhausted` rows have nothing left
    to draw, and the model has no id for that: whatever is drawn ends them. `failed`: # slice |->
    why its grammar says nothing of the next id"""

    rows: tuple[int, ...]
    allowed: Bits
    exhausted: frozenset[int]
    eos_ids: frozenset[int]
    failed: Mapping[int, str]

    def applied(self, logits: torch.Tensor, flat: Sequence[Sequence[int]]) -> torch.Tensor:
        """A copy of `logits` fp32 `[requests, vocab]`, with -inf for ids that are not allowed.
        `flat`: # row |-> its requests"""
        pairs = [(at, i) for i, row in enumerate(self.rows) for at in flat[row]]
        if not pairs:
            return logits
        places, sources = zip(*pairs, strict=True)
        kernel = host_draw() if logits.device.type == "cpu" else None
        if kernel is not None:
            of_rows = np.full(len(logits), -1, np.int64)
            of_rows[list(places)] = sources
            return kernel.mask(logits, of_rows, self.allowed)
        words = send(self.allowed[list(sources)], torch.int32, logits.device)
        bits = words[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)
        is_allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        at = send(places, torch.long, logits.device)
        return logits.index_copy(0, at, logits[at].masked_fill(~is_allowed, float("-inf")))

    def ends(self, row: int, token_id: int) -> bool:
        """Whether the id, drawn for this row, ends the choice because its grammar is matched."""
        return row in self.exhausted or (token_id in self.eos_ids and row in self.rows)


@dataclass(slots=True)
class _Place:
    """A choice's place in its grammar, after the `consumed` ids."""

    matcher: LLMatcher
    consumed: tuple[int, ...] = ()
    used_at: int = 0


@dataclass(slots=True)
class _Wanted:
    """A row whose next id is constrained; `ids` are what its choice has emitted."""

    row: int
    slice: int
    piece: SequenceSlice
    ids: tuple[int, ...]

    @property
    def request(self) -> SampleRequest:
        return self.piece.samples[0]


class Grammars:
    """`tokenizer` None: there is none, and `reason` says why.

    `masks` is called by one thread, and `prepare` by any.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        *,
        vocab: int,
        eos_ids: Iterable[int] = (),
        reason: str = "",
    ) -> None:
        assert tokenizer is None or tokenizer.vocab_size >= vocab, "ids without a bit"
        self.tokenizer = tokenizer
        self.reason = reason
        self._vocab = vocab
        self._eos_ids = frozenset(eos_ids)
        self._places: dict[tuple[RequestKey, int], _Place] = {}
        self._steps = 0
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler: ThreadPoolExecutor | None = None
        self._urgent: ThreadPoolExecutor | None = None  # for what a step waits for
        self._executor: LLExecutor | None = None

    def prepare(self, grammar: str) -> None:
        """Begins to compile the grammar on a thread, unless it is known: it may take a second."""
        if self.tokenizer is not None:
            self._prototype(grammar)

    def _prototype(self, grammar: str) -> Future[LLMatcher]:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            if self._compiler is None:
                self._compiler = _deep_thread()
            found = self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)[1].cancel()
            return found

    def _compiled_now(self, grammar: str) -> LLMatcher:
        """Waits, but not behind grammars that are compiled ahead: a step needs it."""
        found = self._prototype(grammar)
        if found.cancel():
            self._urgent = self._urgent or _deep_thread()
            found = self._urgent.submit(self._compile, grammar)
            with self._lock:
                self._compiled[grammar] = found
        if found.done():
            return found.result()
        FIRST_USES.begin("a grammar")
        try:
            return found.result()
        finally:
            FIRST_USES.end()

    def masks(
        self, slices: Sequence[SequenceSlice], drawn_before: Callable[[int], int]
    ) -> Masks | None:
        """None: no slice is constrained. `drawn_before` tells the id that a slice of the step
        before has drawn, and may wait for it."""
        wanted = list(_wanted(slices, drawn_before))
        if not wanted:
            return None
        self._steps += 1
        if self.tokenizer is None:
            failed = {one.slice: self.reason for one in wanted}
            return self._masks((), np.zeros((0, 0), np.int32), failed)
        found = [(one, self._matcher(one)) for one in wanted]
        bits = self._computed([matcher for _, matcher in found])
        self._forget()
        failed = {one.slice: _error(m) for one, m in found if m.is_error()}
        kept = [i for i, (one, _) in enumerate(found) if one.slice not in failed]
        return self._masks([found[i][0] for i in kept], bits[kept], failed)

    def close(self) -> None:
        for pool in (self._compiler, self._urgent):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _masks(self, wanted: Sequence[_Wanted], bits: Bits, failed: dict[int, str]) -> Masks:
        exhausted = [
            one.row for one, row in zip(wanted, bits, strict=True) if self._narrow(one, row)
        ]
        return Masks(
            rows=tuple(one.row for one in wanted),
            allowed=bits,
            exhausted=frozenset(exhausted),
            eos_ids=self._eos_ids,
            failed=failed,
        )

    def _narrow(self, one: _Wanted, row: NDArray[np.int32]) -> bool:
        """Takes back what may not end the choice yet, as long as anything else is left. True:
        nothing at all was left, so now everything is allowed."""
        rest = row.copy()
        _clear(rest, self._held_back(one))
        if rest.any():
            row[:] = rest
        elif not row.any():
            row[:] = -1
            return True
        return False

    def _held_back(self, one: _Wanted) -> set[int]:
        """Ids that would end it before `min_tokens`, and end-of-sequence ids that it ignores."""
        sampling = one.request.sampling
        stops = sampling.stop_token_ids
        ignored = self._eos_ids.difference(stops)
        return {*stops, *ignored} if one.piece.index < sampling.min_tokens else {*ignored}

    def _matcher(self, one: _Wanted) -> LLMatcher:
        name = (one.piece.key, one.piece.choice)
        place = self._places.get(name)
        if place is None or one.ids[: len(place.consumed)] != place.consumed:
            grammar = one.request.sampling.grammar
            place = self._places[name] = _Place(self._compiled_now(grammar).deep_copy())
        new = one.ids[len(place.consumed) :]
        if new:
            place.matcher.consume_tokens(list(new))
        place.consumed, place.used_at = one.ids, self._steps
        return place.matcher

    def _computed(self, matchers: list[LLMatcher]) -> Bits:
        assert self.tokenizer is not None
        bits = np.zeros((len(matchers), -(-self.tokenizer.vocab_size // 32)), np.int32)
        self._fill(matchers, bits)
        _clear_behind(bits, self._vocab)
        return bits

    def _fill(self, matchers: list[LLMatcher], bits: Bits) -> None:
        threads = torch.get_num_threads()
        if len(matchers) == 1 or threads == 1:
            for i, matcher in enumerate(matchers):
                fill_next_token_bitmask(matcher, bits, i)
            return
        if self._executor is None:
            self._executor = LLExecutor(threads)
        numbered = [(matcher, i) for i, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, numbered, bits)

    def _forget(self) -> None:
        if self._steps % KEPT_STEPS == 0:
            oldest = self._steps - KEPT_STEPS
            gone = [name for name, place in self._places.items() if place.used_at <= oldest]
            for name in gone:
                del self._places[name]

    def _compile(self, grammar: str) -> LLMatcher:
        assert self.tokenizer is not None
        return LLMatcher(self.tokenizer, grammar, log_level=0)


def _wanted(
    slices: Sequence[SequenceSlice], drawn_before: Callable[[int], int]
) -> Iterator[_Wanted]:
    row = 0
    for i, piece in enumerate(slices):
        if not piece.samples:
            continue
        if piece.samples[0].sampling.grammar:
            ids = piece.samples[0].emitted_ids
            if piece.follows is not None:
                ids = (*ids, drawn_before(piece.follows))
            yield _Wanted(row, i, piece, ids)
        row += 1


def _clear_behind(bits: Bits, vocab: int) -> None:
    """Ids that the model doesn't have."""
    words, rest = divmod(vocab, 32)
    if rest:
        bits[:, words] &= (1 << rest) - 1
        words += 1
    bits[:, words:] = 0


def _clear(row: NDArray[np.int32], ids: Iterable[int]) -> None:
    octets = row.view(np.uint8)
    for one in ids:
        if one < 8 * len(octets):
            octets[one >> 3] &= ~np.uint8(1 << (one & 7))


def _error(matcher: LLMatcher) -> str:
    """The first line of its words; the rest is the matcher's state."""
    return f"its grammar can't be followed: {matcher.get_error().split(chr(10), 1)[0]}"


def _deep_thread() -> ThreadPoolExecutor:
    """One thread with a large stack, started at once."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="kvrelay-grammars")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()
    finally:
        threading.stack_size(before)
    return pool


def open_grammars(folder: Path, vocab: int, eos_ids: Sequence[int]) -> Grammars:
    """For the checkpoint's tokenizer.json. Takes a second or two with 128,000 tokens."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return Grammars(None, vocab=vocab, reason=f"{folder} has no tokenizer.json")
    eos_ids = [one for one in eos_ids if one < vocab]
    try:
        tokenizer = _open_tokenizer(path, vocab, eos_ids)
    except Exception as error:
        reason = f"{path} can't be used for structured output: {error}"
        log.warning("%s", reason)
        return Grammars(None, vocab=vocab, reason=reason)
    return Grammars(tokenizer, vocab=vocab, eos_ids=eos_ids)


def _open_tokenizer(path: Path, vocab: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Of a model without an end of sequence an id stands for it that its logits don't have."""
    text = path.read_text(encoding="utf-8")
    known = Tokenizer.from_str(text).get_vocab_size()
    ids = max(known, vocab)
    if eos_ids:
        return LLTokenizer(text, n_vocab=ids, eos_token=[*eos_ids])
    return LLTokenizer(text, n_vocab=ids + 1, eos_token=[ids])
