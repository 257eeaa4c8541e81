"""Requests as a trace tells of them: when, how long, which blocks of the prompt are equal. Pure.

Nothing of the prompts' length is ever built.

A trace at another rate, or several times at once. Pure.

What the simulated model says: nothing of meaning, for as long as the trace says. Pure.

What became of each simulated request. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import overload

import numpy as np

from engine.core.step import Sampled, SequenceSlice
from kvpool.core.layout.hashes import BlockHash, BlockHashes, CacheSalt, NamedTokens
from kvrelay.types import Sampling
from router.core.request import Ledger

HASH_TOKENS = 512
"""Tokens that one hash id of a trace stands for."""
_MIX = 2654435761
_IDS = 2**32
_PRIME = 1_000_003
_NAME = np.dtype([("scattered", "<u4"), ("mark", "V16"), ("block", ">u8"), ("end", ">u4")])
"""A block's name: its first bytes are scattered, as those of hashes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """`hash_ids` name the prompt's blocks of `hash_tokens` tokens (the last may be shorter): equal
    ids, equal prompts up to the block's end. None: it is like no other."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    hash_tokens: int = HASH_TOKENS
    tenant: str = ""


class TracePrompt(NamedTokens):
    """`number` is the request's own; `copy` tells a replica's prompts from those of the others."""

    def __init__(self, request: TraceRequest, number: int, copy: int = 0) -> None:
        self._length = request.input_tokens
        self._hash_ids = request.hash_ids
        self._hash_tokens = request.hash_tokens
        self._number = number
        self.copy = copy
        self._named: tuple[CacheSalt, int] | None = None
        self._names = BlockHashes()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return _Part(self, range(self._length)[at])
        position = range(self._length)[at]
        return (self._id(position) * _MIX + position) % _IDS

    def iterate(self, positions: range) -> Iterator[int]:
        """The token ids there."""
        size = self._hash_tokens
        blocks = range(positions.start // size, -(-positions.stop // size))
        return chain.from_iterable(self._of_block(block * size, positions) for block in blocks)

    def _of_block(self, first: int, positions: range) -> list[int]:
        mixed = self._id(first) * _MIX
        start, stop = max(first, positions.start), min(first + self._hash_tokens, positions.stop)
        return [(mixed + position) % _IDS for position in range(start, stop)]

    def _id(self, position: int) -> int:
        if self._hash_ids is None:
            return _IDS + self._number
        return self._hash_ids[position // self._hash_tokens] * 131 + self.copy

    def names(self, blocks: range, block_size: int, salt: CacheSalt) -> BlockHashes:
        if self._named != (salt, block_size):
            self._named = (salt, block_size)
            self._names = BlockHashes(self._all_names(block_size, salt))
        return self._names[blocks.start : blocks.stop]

    def name(self, block: int, block_size: int, salt: CacheSalt) -> BlockHash:
        return self.names(range(block, block + 1), block_size, salt).at(0)

    def _all_names(self, block_size: int, salt: CacheSalt) -> bytes:
        """Equal for equal tokens before a block's end: the block of the trace that it lies in, and
        where. That stands for all tokens before it."""
        seed, of, mark = int.from_bytes(salt[:4]), self._number, b"own" + bytes(5)
        at = np.arange(self._length // block_size, dtype=np.uint64)
        names = np.empty(len(at), _NAME)
        names["block"], names["end"] = of, at
        if self._hash_ids is not None:
            of, mark = self.copy, self.copy.to_bytes(4) + bytes(4)
            last = at * np.uint64(block_size) + np.uint64(block_size - 1)
            block, within = np.divmod(last, np.uint64(self._hash_tokens))
            names["block"] = ids = np.array(self._hash_ids, np.uint64)[block]
            names["end"] = within + np.uint64(1)
            at = ids * np.uint64(HASH_TOKENS) + within
        names["mark"] = np.void(salt[:8] + mark)
        names["scattered"] = (
            (at + np.uint64(seed + of * _PRIME)) * np.uint64(_MIX) % np.uint64(_IDS)
        )
        return names.tobytes()


class _Part(Sequence[int]):
    """Some of a prompt's tokens."""

    def __init__(self, prompt: TracePrompt, positions: range) -> None:
        self._prompt = prompt
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[int]:
        return self._prompt.iterate(self._positions)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return _Part(self._prompt, self._positions[at])
        return self._prompt[self._positions[at]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceArrival:
    request: TraceRequest
    prompt: TracePrompt


def arrivals(
    requests: Sequence[TraceRequest], *, rate_scale: float, replicas: int, draw: Callable[[], float]
) -> list[TraceArrival]:
    """At `rate_scale` times the rate: times are divided by it. Each request comes `replicas` times,
    the copies with prompts of their own, put off by a share (from `draw`) of the mean gap."""
    gap_s = requests[-1].arrival_s / len(requests) / rate_scale
    timed = [
        (_later(one, min(copy, 1) * draw() * gap_s, rate_scale), copy)
        for one in requests
        for copy in range(replicas)
    ]
    timed.sort(key=lambda pair: pair[0].arrival_s)
    return [
        TraceArrival(request=request, prompt=TracePrompt(request, number, copy))
        for number, (request, copy) in enumerate(timed)
    ]


def _later(request: TraceRequest, put_off_s: float, rate_scale: float) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s / rate_scale + put_off_s)


END = 2
"""The token that ends a sequence which asked for more than it yields."""


class Answers:
    """`request_id` is the arrival's number. `max_tokens` None: each asks for just what it gets."""

    def __init__(self, arrivals: Sequence[TraceArrival], max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._output = [one.request.output_tokens for one in arrivals]
        self._end = Sampled(token_id=END)

    def sampling(self, number: int) -> Sampling:
        output = self._output[number]
        if self._max_tokens is None:
            return Sampling(max_tokens=output, seed=number)
        most = max(self._max_tokens, output)
        return Sampling(max_tokens=most, seed=number, stop_token_ids=(END,))

    def steps_left(self, one: SequenceSlice) -> int:
        """Until the sequence ends."""
        if not one.samples or "-" in one.key.request_id:
            return 1
        return self._output[int(one.key.request_id)] - one.index

    def drawn(self, one: SequenceSlice, steps: int) -> tuple[Sampled, ...]:
        """Of so many steps, one for each."""
        if not one.samples:
            return ()
        if "-" in one.key.request_id:  # computed ahead of its prompt
            return (self._end,)
        number = int(one.key.request_id)
        token = Sampled(token_id=END + 1 + number)
        if len(one.samples) > 1:  # the first token of each choice
            return (token,) * len(one.samples)
        if one.index + steps < self._output[number]:
            return (token,) * steps
        return (*(token,) * (steps - 1), self._end)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one request; `refused` and `failed` are reasons. `resubmitted_s`: the last
    time that it came back. `ledger`: its router's, once it has a token."""

    request: TraceRequest
    resubmitted_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    tokens: int = 0
    done: bool = False
    cached_tokens: int = 0
    prefilled_locally: bool = False
    refusals: int = 0
    retries: int = 0
    refused: str = ""
    failed: str = ""
    ledger: Ledger | None = None

    @property
    def ttft_s(self) -> float | None:
        """Since it was last submitted: what it waited before, it was told to."""
        if self.first_token_s is None:
            return None
        since_s = self.resubmitted_s
        return self.first_token_s - (self.request.arrival_s if since_s is None else since_s)

    @property
    def e2e_s(self) -> float | None:
        """Of one that is done."""
        if not self.done or self.last_token_s is None:
            return None
        return self.last_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """The mean per token after the first; None without any."""
        if not self.done or self.first_token_s is None or self.last_token_s is None:
            return None
        if self.tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)
