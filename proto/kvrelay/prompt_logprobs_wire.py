"""Log probabilities of a prompt's tokens, to protobuf and back.

Pure. Flat arrays, for prompts are long. What this module can't read raises PeerError.
"""

from __future__ import annotations

from kvrelay.errors import PeerError
from kvrelay.messages import PromptLogprobs
from kvrelay.types import PromptLogprob, RequestKey
from kvrelay.v1 import worker_pb2 as pb


def encode_prompt_logprobs(event: PromptLogprobs) -> pb.PromptLogprobs:
    """All entries of an event have equally many alternatives."""
    entries = event.entries
    return pb.PromptLogprobs(
        first_position=event.first_position,
        token_ids=[entry.token_id for entry in entries],
        logprobs=[entry.logprob for entry in entries],
        ranks=[entry.rank for entry in entries],
        top=len(entries[0].top) if entries else 0,
        top_ids=[token_id for entry in entries for token_id, _ in entry.top],
        top_logprobs=[logprob for entry in entries for _, logprob in entry.top],
    )


def decode_prompt_logprobs(
    message: pb.PromptLogprobs, key: RequestKey, at_s: float
) -> PromptLogprobs:
    count, top = len(message.token_ids), message.top
    pairs = [*zip(message.top_ids, message.top_logprobs, strict=False)]
    if not count == len(message.logprobs) == len(message.ranks) or len(pairs) != count * top:
        raise PeerError("a worker sent prompt logprobs of unequal lengths")
    told = zip(message.token_ids, message.logprobs, message.ranks, strict=True)
    return PromptLogprobs(
        key=key,
        at_s=at_s,
        first_position=message.first_position,
        entries=tuple(
            PromptLogprob(token_id, logprob, rank, tuple(pairs[i * top : (i + 1) * top]))
            for i, (token_id, logprob, rank) in enumerate(told)
        ),
    )
