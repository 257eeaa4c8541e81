"""The client's arguments become protobuf, and protobuf becomes the client's results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence

from kvrelay.client.going_on import Retries
from kvrelay.client.options import REQUEST_FIELDS, GenerateOptions
from kvrelay.codec import MessageCodec
from kvrelay.errors import InvalidRequest, KvrelayError, Refused
from kvrelay.results import (
    ChatMessage,
    Choice,
    Chunk,
    Generated,
    ModelInfo,
    ServerInfo,
    Slo,
)
from kvrelay.status import LEDGER_KEY, Metadata
from kvrelay.types import FinishReason, PromptLogprob
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire import logprobs_from_wire

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids or a chat."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises InvalidRequest for a value that the protocol can't carry."""
    try:
        return _generate_request(prompt, options)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a value has the wrong type or range: {error}") from error


def _generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    sampling = {name: value for name, value in options.items() if name not in REQUEST_FIELDS}
    sampling |= _constraint(sampling)
    request = pb.GenerateRequest(
        request_id=options.get("request_id") or f"gen-{uuid.uuid4().hex}",
        model=options.get("model", ""),
        tenant=options.get("tenant", ""),
        tier=options.get("tier", ""),
        slo=_slo(options.get("slo", Slo()), options.get("deadline_s")),
        ledger=options.get("ledger", False),
        sampling_params=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    _check_variables(prompt, options)
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(pb.ChatInput(messages=[_message(part) for part in prompt]))
        variables = options.get("chat_template_kwargs", {})
        request.chat.chat_template_kwargs.update(variables)  # type: ignore[arg-type]
    else:
        request.tokenized.CopyFrom(pb.TokenizedInput(input_ids=prompt))  # type: ignore[arg-type]
    return request


CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")


def _constraint(sampling: Mapping[str, object]) -> dict[str, object]:
    """As the protocol carries it. Raises InvalidRequest if there are several."""
    given = [name for name in CONSTRAINTS if name in sampling]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)}: send one of them", param=given[1])
    match given:
        case ["json_schema"] if not isinstance(sampling["json_schema"], str):
            return {"json_schema": json.dumps(sampling["json_schema"])}
        case ["choice"]:
            return {"choice": pb.ChoiceConstraint(choices=_texts(sampling["choice"]))}
        case _:
            return {}


def _texts(choice: object) -> list[str]:
    if not isinstance(choice, Sequence) or isinstance(choice, str):
        raise TypeError(f"choice is a list of texts, not {choice!r}")
    return list(choice)


def _is_chat(prompt: Prompt) -> bool:
    return any(isinstance(part, ChatMessage) for part in prompt)


def _check_variables(prompt: Prompt, options: GenerateOptions) -> None:
    if options.get("chat_template_kwargs") and not _is_chat(prompt):
        raise InvalidRequest(
            "chat_template_kwargs are for a chat: send ChatMessages", param="chat_template_kwargs"
        )


def _slo(slo: Slo, deadline_s: float | None) -> pb.Slo:
    given = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s, "deadline_ms": deadline_s}
    return pb.Slo(**{name: 1000 * s for name, s in given.items() if s is not None})


def retries_of(request: pb.GenerateRequest, retries: int, now_s: float) -> Retries:
    has_deadline = request.slo.HasField("deadline_ms")
    until_s = now_s + request.slo.deadline_ms / 1000 if has_deadline else None
    return Retries(left=retries, until_s=until_s)


def renew(request: pb.GenerateRequest, retries: Retries, error: KvrelayError, now_s: float) -> None:
    """For a request that is sent again: the rest of its deadline, and what a refusal promised."""
    if isinstance(error, Refused) and error.promise:
        request.promise = error.promise
    remaining_s = retries.remaining_s(now_s)
    if remaining_s is not None:
        request.slo.deadline_ms = max(1.0, 1000 * remaining_s)


def _message(part: object) -> pb.ChatMessage:
    if not isinstance(part, ChatMessage):
        raise TypeError(f"a chat is made of ChatMessage, not {part!r}")
    return pb.ChatMessage(role=part.role, content=part.content)


def chunk_of(response: pb.GenerateResponse) -> Chunk:
    reason = response.WhichOneof("stop_reason")
    finish = FinishReason(response.finish_reason) if response.finish_reason else None
    return Chunk(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(map(logprobs_from_wire, response.logprobs)),
        finish_reason=finish,
        stop_string=response.stop_string if reason == "stop_string" else None,
        stop_token_id=response.stop_token_id if reason == "stop_token_id" else None,
        prompt_tokens=response.prompt_tokens,
        cached_tokens=response.cached_tokens,
        completion_tokens=response.completion_tokens,
        seed=response.seed,
        capped_tokens=response.capped_tokens if response.HasField("capped_tokens") else None,
        prompt_logprobs=tuple(_prompt_logprob(entry) for entry in response.input_logprobs),
        tier=response.tier,
    )


def _prompt_logprob(entry: pb.PromptLogprob) -> PromptLogprob:
    top = tuple((best.token_id, best.logprob) for best in entry.top)
    return PromptLogprob(entry.token.token_id, entry.token.logprob, entry.rank, top)


def generated_of(chunks: Sequence[Chunk], ledger_ms: Mapping[str, float]) -> Generated:
    indexes = sorted({chunk.index for chunk in chunks})
    by_choice = [[chunk for chunk in chunks if chunk.index == index] for index in indexes]
    return Generated(
        request_id=chunks[0].request_id,
        choices=tuple(_choice(own) for own in by_choice),
        prompt_tokens=chunks[0].prompt_tokens,
        cached_tokens=chunks[0].cached_tokens,
        completion_tokens=sum(own[-1].completion_tokens for own in by_choice),
        seed=chunks[0].seed,
        capped_tokens=chunks[0].capped_tokens,
        prompt_logprobs=chunks[0].prompt_logprobs,
        tier=chunks[0].tier,
        ledger_ms=ledger_ms,
    )


def _choice(chunks: Sequence[Chunk]) -> Choice:
    last = chunks[-1]
    assert last.finish_reason is not None, f"choice {last.index} ended without a finish reason"
    return Choice(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=last.finish_reason,
        stop_string=last.stop_string,
        stop_token_id=last.stop_token_id,
    )


def ledger_of(trailing: Metadata | None) -> dict[str, float]:
    found = [value for key, value in trailing or () if key == LEDGER_KEY]
    return json.loads(found[0]) if found else {}


model_info_of = MessageCodec(ModelInfo, pb.GetModelInfoResponse, "a router").decode
server_info_of = MessageCodec(ServerInfo, pb.GetServerInfoResponse, "a router").decode
