"""kvrelay.v1.Inference's messages <-> the router's values."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf

from google.protobuf.json_format import MessageToDict

from kvrelay.errors import InvalidRequest
from kvrelay.reports_wire import encode_step_times
from kvrelay.types import Objectives, TokenLogprobs
from kvrelay.v1 import inference_pb2 as pb
from router.core.state.generation import QuarantinedPair, WorkerStatus
from router.text.request_fields import FIELDS, objectives_of
from router.text.sampling import RequestedSampling
from router.text.service import ChatPrompt, PromptInput, TextDelta, TextGeneration

OPTIONAL_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "seed",
)


def sampling_of(message: pb.SamplingParams) -> RequestedSampling:
    given = {name: getattr(message, name) for name in OPTIONAL_FIELDS if message.HasField(name)}
    return RequestedSampling(
        **given,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        skip_special_tokens=message.skip_special_tokens
        if message.HasField("skip_special_tokens")
        else True,
        include_stop_str_in_output=message.include_stop_str_in_output,
        ignore_eos=message.ignore_eos,
        n=message.n if message.HasField("n") else 1,
        logit_bias=dict(message.logit_bias),
    )


def objectives_in(slo: pb.Slo, call_remaining_s: float | None) -> Objectives:
    """The call's own deadline counts if it is earlier. Raises InvalidRequest."""
    given = {f"slo.{field.name}": value for field, value in slo.ListFields()}
    asked = objectives_of(given, FIELDS)
    if call_remaining_s is None or (asked.deadline_s or inf) <= call_remaining_s:
        return asked
    return replace(asked, deadline_s=call_remaining_s)


def prompt_of(request: pb.GenerateRequest) -> PromptInput:
    match request.WhichOneof("input"):
        case "tokenized":
            return tuple(request.tokenized.input_ids)
        case "text":
            return request.text
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("set one of tokenized, text or chat", param="input")


def _chat(chat: pb.ChatInput) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    return ChatPrompt(
        [{"role": m.role, "content": m.content} for m in chat.messages],
        template_kwargs={name: _variable(v) for name, v in _struct(chat).items()},
    )


def _struct(chat: pb.ChatInput) -> dict[str, object]:
    try:
        return MessageToDict(chat.chat_template_kwargs)
    except ValueError as error:
        param = "chat.chat_template_kwargs"
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def _variable(value: object) -> object:
    """The protocol has no integers: without this a template would write 5 as 5.0."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_variable(one) for one in value]
        case dict():
            return {name: _variable(one) for name, one in value.items()}
        case _:
            return value


def prompt_told(generation: TextGeneration) -> list[pb.PromptLogprob]:
    """The prompt's part of the first message."""
    return [
        pb.PromptLogprob(
            token=pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
            top=[pb.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in entry.top],
            rank=entry.rank,
        )
        for entry in generation.prompt_logprobs
    ]


def response_of(generation: TextGeneration, delta: TextDelta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=generation.request_id,
        index=delta.choice,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[_logprobs(entry) for entry in delta.logprobs],
        finish_reason=delta.finish_reason or "",
        prompt_tokens=len(generation.prompt_ids),
        cached_tokens=generation.cached_tokens,
        completion_tokens=delta.completion_tokens,
        seed=generation.sampling.seed,
        capped_tokens=generation.capped_tokens,
        tier=generation.tier,
    )
    if delta.stop_string is not None:
        response.stop_string = delta.stop_string
    elif delta.stop_token_id is not None:
        response.stop_token_id = delta.stop_token_id
    return response


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
        top=[pb.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in entry.top],
    )


def worker_info(worker: WorkerStatus) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        name=worker.name,
        address=worker.address,
        incarnation=worker.incarnation,
        role=worker.role,
        device=worker.device,
        cpus=worker.cpus,
        transport=worker.transport,
        total_blocks=worker.total_blocks,
        free_blocks=worker.counters.free_blocks,
        cached_blocks=worker.counters.cached_blocks,
        block_size=worker.block_size,
        running=worker.counters.running,
        waiting=worker.counters.waiting,
        links=[pb.LinkInfo(**asdict(link)) for link in worker.links],
        step_times=encode_step_times(worker.step_times),
        prefill_correction=worker.counters.prefill_correction,
        decode_correction=worker.counters.decode_correction,
        prompt_tokens_per_s=worker.activity.prompt_tokens_per_s,
        generated_tokens_per_s=worker.activity.generated_tokens_per_s,
        kv_used=worker.activity.kv_used,
        hit_rate=worker.activity.hit_rate,
        transfer_bytes_per_s=worker.activity.transfer_bytes_per_s,
        kv_token_bytes=worker.kv_token_bytes,
    )


def quarantined_pair(pair: QuarantinedPair) -> pb.QuarantinedPair:
    return pb.QuarantinedPair(**asdict(pair))
