"""A router's record as a trace: who came when, with what prompt, and how much they got. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cluster.sim.trace import TraceRequest
from kvpool.hashes import BlockHash, CacheSalt, extend_chain
from kvrelay.errors import ConfigError
from router.beginning import Beginning
from router.events import Deliver, Submitted
from router.generation import GenerationRequest
from router.record import Entry, from_line

RECORDED_TOKENS = 16
"""Prompts are told apart in blocks of so many tokens."""
_SALT = CacheSalt(bytes(32))


@dataclass(slots=True)
class _Asked:
    number: int
    at_s: float
    request: GenerationRequest
    tokens: int = 0


@dataclass(slots=True)
class _Ids:
    """# the tokens up to a block's end |-> a number"""

    known: dict[BlockHash, int] = field(default_factory=dict)

    def of(self, request: GenerationRequest) -> tuple[int, ...]:
        """The last block, where it is short, is like no other."""
        prompt = tuple(request.prompt_ids)
        chain: list[BlockHash] = []
        extend_chain(chain, prompt, len(prompt), block_size=RECORDED_TOKENS, salt=_SALT)
        if len(prompt) % RECORDED_TOKENS:
            chain.append(BlockHash(request.request_id.encode()))
        return tuple(self.known.setdefault(one, len(self.known)) for one in chain)


def recorded_requests(
    name: str, lines: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, TraceRequest]]:
    """With the number of the line that it came in. Those that got no tokens asked for at most
    `max_tokens`. Raises ConfigError."""
    asked: dict[str, _Asked] = {}
    over: list[_Asked] = []
    for number, line in lines:
        entry = _parsed(name, number, line)
        if isinstance(entry, Entry):
            _follow(entry, number, asked, over)
    ids = _Ids()
    for one in sorted([*over, *asked.values()], key=lambda one: one.number):
        yield one.number, _request(one, ids)


def _follow(entry: Entry, number: int, asked: dict[str, _Asked], over: list[_Asked]) -> None:
    if isinstance(entry.event, Submitted):
        request = entry.event.request
        if request.request_id in asked:
            over.append(asked[request.request_id])
        asked[request.request_id] = _Asked(number, entry.at_s, request)
    for command in entry.commands:
        if isinstance(command, Deliver) and command.request_id in asked:
            asked[command.request_id].tokens += sum(len(one.token_ids) for one in command.tokens)


def _request(one: _Asked, ids: _Ids) -> TraceRequest:
    return TraceRequest(
        arrival_s=one.at_s,
        input_tokens=len(one.request.prompt_ids),
        output_tokens=one.tokens or one.request.sampling.max_tokens,
        hash_ids=ids.of(one.request),
        hash_tokens=RECORDED_TOKENS,
        tenant=one.request.tenant,
    )


def _parsed(name: str, number: int, line: str) -> Beginning | Entry:
    try:
        return from_line(line)
    except ValueError as error:
        raise ConfigError(f"{name}:{number}: {error}") from None
