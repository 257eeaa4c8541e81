"""The client's arguments become protobuf, and protobuf becomes the client's results.

Also the options of `generate` and `stream` with their help texts, the choice between several
routers, and the retries of refused requests. The client uses the router that answered last until it
is gone, then the next untried one; a stream that has begun goes on there. It comes back after a
refusal at the time that the refusal names.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, cleandoc, signature
from math import inf
from textwrap import fill
from typing import Generic, TypedDict, TypeVar

from kvrelay.codec import MessageCodec
from kvrelay.errors import InvalidRequest, KvrelayError, Refused, RequestFailedError
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

Method = TypeVar("Method", bound=Callable[..., object])


class SamplingOptions(TypedDict, total=False):
    """An absent option has the value of the model's generation config, then the neutral value."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    seed: int
    logit_bias: Mapping[int, float]
    json_schema: Mapping[str, object] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


class GenerateOptions(SamplingOptions, total=False):
    """The sampling options, and those of the request itself."""

    request_id: str
    model: str
    chat_template_kwargs: Mapping[str, object]
    tenant: str
    tier: str
    slo: Slo
    deadline_s: float
    ledger: bool


REQUEST_FIELDS = (
    *("request_id", "model", "chat_template_kwargs"),
    *("tenant", "tier", "slo", "deadline_s", "ledger"),
)

RETRIES_HELP = (
    "A refused request is sent again up to this many times, at the time that its refusal names."
)
HELP: Mapping[str, str] = {
    "temperature": "0 takes the likeliest token; higher values draw more evenly.",
    "top_p": "Draw from the likeliest tokens that together have this probability.",
    "top_k": "Draw from this many likeliest tokens; 0 or -1: from all.",
    "min_p": "Leave out tokens below this share of the likeliest one's probability.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "presence_penalty": "Subtracted from a token's logit once it was generated.",
    "repetition_penalty": "Divides the logits of tokens of the prompt and the output; 1: none.",
    "max_tokens": "At most this many tokens; absent: the rest of the context.",
    "min_tokens": "No end and no stop before this many tokens.",
    "stop": "Strings that end the output.",
    "stop_token_ids": "Tokens that end the output.",
    "skip_special_tokens": "Leave special tokens out of the text; on by default.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "ignore_eos": "Continue after the model's own end, up to max_tokens.",
    "n": "How many answers to draw.",
    "logprobs": "Return each token's log probability, and this many of the likeliest.",
    "prompt_logprobs": "The same for the tokens of the prompt, which is then computed whole.",
    "seed": "The same seed draws the same tokens; absent: a random one, which the answer names.",
    "logit_bias": "Added to the logits, by token id.",
    "json_schema": "The output is JSON that is valid for this schema.",
    "json_object": "The output is a JSON object.",
    "regex": "The whole output matches this regular expression.",
    "choice": "The output is one of these texts.",
    "grammar": "The output matches this grammar, in llguidance's Lark.",
    "request_id": "The id in logs and for `kvrelay trace`; absent: a random one.",
    "model": "Refuse any other model.",
    "chat_template_kwargs": "Variables for the chat template, such as enable_thinking.",
    "tenant": "Requests of different tenants share no cached KV.",
    "tier": "The QoS tier, one of those that the cluster file names.",
    "slo": "Objectives: time to first token and per token; absent: those of the tier.",
    "deadline_s": "Stop when this many seconds have passed, waits before retries included.",
    "ledger": "Return the time that each phase took, in `ledger_ms`.",
}
"""# option |-> its help text"""


class _Absent:
    """The default that `help()` shows: the option is not sent."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def with_options(method: Method) -> Method:
    """Shows each option in the signature and the docstring; an option without help is a bug."""
    given = signature(method)
    own = [p for p in given.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [_parameter(name, kind) for name, kind in _annotations().items()]
    method.__signature__ = given.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    lines = [_described("retries", RETRIES_HELP)]
    lines += [_described(name, HELP[name]) for name in _annotations()]
    method.__doc__ = "\n".join([cleandoc(method.__doc__ or ""), "", "Options:", *lines])
    return method


def _annotations() -> dict[str, object]:
    return SamplingOptions.__annotations__ | GenerateOptions.__annotations__


def _parameter(name: str, kind: object) -> Parameter:
    text = getattr(kind, "__forward_arg__", kind)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=ABSENT, annotation=text)


def _described(name: str, text: str) -> str:
    return fill(f"{name}: {text}", 96, initial_indent="    ", subsequent_indent="        ")


Stub = TypeVar("Stub")

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Log probabilities of a long prompt exceed the 4 MiB that gRPC accepts by default. A router that
does not answer for 4 s is gone."""


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Raises ValueError when there is none."""
    addresses = (given,) if isinstance(given, str) else tuple(given)
    if not addresses:
        raise ValueError("expected at least one HOST:PORT")
    return addresses


KEY_VARIABLE = "KVRELAY_API_KEY"


def api_key_of(given: str | None) -> str:
    """Empty: no key is sent."""
    return os.environ.get(KEY_VARIABLE, "") if given is None else given


def with_key(stub: Stub, api_key: str) -> Stub:
    """Its calls bring the key. An empty one is none."""
    if api_key:
        metadata = (("authorization", f"Bearer {api_key}"),)
        for name, call in list(vars(stub).items()):
            setattr(stub, name, partial(call, metadata=metadata))
    return stub


class Routers(Generic[Stub]):
    def __init__(self, stubs: Sequence[Stub]) -> None:
        self.stubs, self.current = tuple(stubs), 0

    def tour(self) -> Tour[Stub]:
        return Tour(self)


class Tour(Generic[Stub]):
    """The routers of one request: each is tried once."""

    def __init__(self, routers: Routers[Stub]) -> None:
        self._routers = routers
        self._at = routers.current
        self._left = len(routers.stubs) - 1

    @property
    def routers(self) -> int:
        return len(self._routers.stubs)

    @property
    def stub(self) -> Stub:
        return self._routers.stubs[self._at]

    def try_next(self, error: KvrelayError) -> bool:
        """True if another router is left to try, and may serve a call that had no result: this one
        is gone, or stops."""
        stops = isinstance(error, Refused) and error.reason == "draining"
        if not (stops or is_gone(error)) or not self._left:
            return False
        self._left -= 1
        self.go_on()
        return True

    def go_on(self) -> None:
        """To the next router, also one that was tried before."""
        self._at = (self._at + 1) % len(self._routers.stubs)
        self._routers.current = self._at


def is_gone(error: KvrelayError) -> bool:
    """A router itself never sends this reason."""
    return isinstance(error, RequestFailedError) and error.reason == "unavailable"


RECONNECT_FOR_S = 10.0
"""For so long a stream is tried again when no router answers. A router that was killed is back
before."""
NO_WORKER_FOR_S = 600.0
"""For so long a stream is tried again while routers know no worker, as they themselves wait for one
(`failover_patience`)."""
RECONNECT_EVERY_S = 0.25


@dataclass(slots=True, kw_only=True)
class SoFar:
    """What a stream has delivered, so that it can go on at another router when its own is gone.

    `routers` are how many may be asked. `has_begun`: something was delivered."""

    routers: int
    has_begun: bool = False
    _answer: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    _ticket: bytes = b""
    _choices: dict[int, pb.Delivered] = field(default_factory=dict)
    _losses: int = 0  # since something was delivered
    _lost_s: float = 0.0  # when each router had been asked once
    _answered_s: float = -inf  # when a router has refused last

    def add(self, response: pb.GenerateResponse) -> None:
        self.has_begun, self._losses = True, 0
        self._ticket = self._ticket or response.ticket
        self._answer = response
        choice = self._choices.setdefault(response.index, pb.Delivered())
        choice.token_ids.extend(response.token_ids)
        choice.finished |= bool(response.finish_reason)

    def is_whole(self, request: pb.GenerateRequest) -> bool:
        """All choices have ended."""
        finished = sum(choice.finished for choice in self._choices.values())
        return self.has_begun and finished == _choices_of(request)

    def try_go_on(
        self, tour: Tour[Stub], request: pb.GenerateRequest, error: KvrelayError, now_s: float
    ) -> float | None:
        """At the next router, after this many seconds; None: not at all."""
        delay_s = self.delay_s(error, now_s)
        if delay_s is not None:
            tour.go_on()
            self.go_on(request)
        return delay_s

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """When to ask the next router; None: not, since another one would say the same, or all have
        been gone, or without workers, for long."""
        is_refused = isinstance(error, Refused) and error.retry_after_s is not None
        if not (is_refused or is_gone(error)):
            return None
        self._losses += 1
        if is_refused:
            self._answered_s = now_s
        if self._losses < self.routers:
            return 0.0
        if self._losses == self.routers:
            self._lost_s = now_s
        return RECONNECT_EVERY_S if self._is_hoped_for(now_s) else None

    def _is_hoped_for(self, now_s: float) -> bool:
        silent_s = now_s - max(self._lost_s, self._answered_s)
        return silent_s < RECONNECT_FOR_S and now_s - self._lost_s < NO_WORKER_FOR_S

    def go_on(self, request: pb.GenerateRequest) -> None:
        """The request becomes one that goes on behind all that was delivered."""
        asked, answer = request.sampling_params, self._answer
        asked.seed = answer.seed
        asked.ClearField("prompt_logprobs")
        request.ClearField("promise")
        if answer.HasField("capped_tokens"):
            asked.max_tokens = answer.capped_tokens
        choices = [self._choices.get(i, pb.Delivered()) for i in range(_choices_of(request))]
        request.continuation.CopyFrom(pb.Continuation(choices=choices, ticket=self._ticket))


def _choices_of(request: pb.GenerateRequest) -> int:
    asked = request.sampling_params
    return asked.n if asked.HasField("n") else 1


@dataclass(slots=True, kw_only=True)
class Retries:
    """The retries of one request: at most `left` more, all of them by `until_s` if it has a
    deadline."""

    left: int
    until_s: float | None = None

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """None: coming back won't help, or isn't allowed. A returned delay counts as a retry."""
        if not isinstance(error, Refused) or error.retry_after_s is None or not self.left:
            return None
        if self.until_s is not None and now_s + error.retry_after_s >= self.until_s:
            return None
        self.left -= 1
        return error.retry_after_s

    def remaining_s(self, now_s: float) -> float | None:
        """The rest of the deadline; None without one."""
        return None if self.until_s is None else max(0.0, self.until_s - now_s)


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
