"""Fields of OpenAI's and vLLM's requests without an effect here, and the values that need none.

null is neutral for each of them. Any other value would change the answer, so it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Neutral:
    """Only `values` and null are accepted. `instead` says why, or what to send."""

    values: tuple[object, ...] = ()
    instead: str = ""

    def accepts(self, given: object) -> bool:
        """True doesn't equal 1."""
        kinds = ((one, type(one) is bool) for one in (None, *self.values))
        return any(given == one and is_bool == (type(given) is bool) for one, is_bool in kinds)

    def advice(self) -> str:
        """What to do where the value is not accepted."""
        instead = f"{self.instead}; " if self.instead else ""
        accepted = " or ".join(json.dumps(value) for value in (None, *self.values))
        return f"{instead}leave it out or send {accepted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anything(Neutral):
    """Any value is accepted, because none changes the answer."""

    def accepts(self, given: object) -> bool:
        return True


ANYTHING = Anything()

STRUCTURED = "send structured_outputs"
NO_MEDIA = "only text is supported"
NO_SEARCH = "only sampling is supported, no beam search"
NO_EXTENSIONS = "there are no such extensions"

COMMON_NEUTRAL: Mapping[str, Neutral] = {
    # OpenAI's
    "user": ANYTHING,
    "metadata": ANYTHING,
    "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "prompt_cache_options": ANYTHING,
    "prompt_cache_retention": ANYTHING,
    "store": Neutral(values=(False,), instead="answers are not kept"),
    "service_tier": Neutral(values=("auto", "default"), instead="send tier"),
    "best_of": Neutral(values=(1,), instead=NO_SEARCH),
    # vLLM's
    "use_beam_search": Neutral(values=(False,), instead=NO_SEARCH),
    "length_penalty": Neutral(values=(1.0,), instead=NO_SEARCH),
    "watermarking": Neutral(values=(False,), instead="answers have no watermark"),
    "spaces_between_special_tokens": ANYTHING,
    "truncate_prompt_tokens": Neutral(instead="a prompt that is too long is refused"),
    "truncation_side": Neutral(values=("left", "right"), instead="no prompt is truncated"),
    "allowed_token_ids": Neutral(instead="send logit_bias"),
    "bad_words": Neutral(values=([],), instead="send logit_bias"),
    "logprob_token_ids": Neutral(instead="send logprobs"),
    "detokenize": Neutral(values=(True,), instead="send return_token_ids"),
    "guided_json": Neutral(instead=STRUCTURED),
    "guided_regex": Neutral(instead=STRUCTURED),
    "guided_choice": Neutral(instead=STRUCTURED),
    "guided_grammar": Neutral(instead=STRUCTURED),
    "guided_decoding_backend": Neutral(instead=STRUCTURED),
    "guided_whitespace_pattern": Neutral(instead=STRUCTURED),
    "logits_processors": Neutral(values=([],), instead=NO_EXTENSIONS),
    "priority": Neutral(values=(0,), instead="send tier"),
    "request_id": Neutral(instead="send the header x-request-id"),
    "session_id": ANYTHING,
    "return_tokens_as_token_ids": Neutral(values=(False,), instead="send return_token_ids"),
    "return_token_offsets": ANYTHING,
    "return_mm_kwargs": ANYTHING,
    "mm_payload": ANYTHING,
    "routed_experts_prompt_start": Neutral(values=(0,), instead="routing is not reported"),
    "kv_transfer_params": Neutral(instead="the router chooses the workers"),
    "ec_transfer_params": Neutral(instead=NO_MEDIA),
    "vllm_xargs": Neutral(values=({},), instead=NO_EXTENSIONS),
    "repetition_detection": Neutral(instead="send a penalty"),
    "thinking_token_budget": Neutral(values=(-1,), instead="send max_tokens"),
    "stream_interval": Neutral(values=(1,), instead="every step's tokens are sent"),
}

_OF_EVERY_CALL = (
    *("watermarking", "session_id", "return_mm_kwargs", "mm_payload", "vllm_xargs"),
    *("kv_transfer_params", "ec_transfer_params"),
)
VLLM_NEUTRAL: Mapping[str, Neutral] = {name: COMMON_NEUTRAL[name] for name in _OF_EVERY_CALL}
"""What vLLM adds to OpenAI's Responses API and to Anthropic's API."""

COMPLETION_NEUTRAL: Mapping[str, Neutral] = {
    **COMMON_NEUTRAL,
    "suffix": Neutral(values=("",), instead="the model only continues the prompt"),
    "prompt_embeds": Neutral(instead="send text or token ids"),
}

TEMPLATE_NEUTRAL: Mapping[str, Neutral] = {
    "continue_final_message": Neutral(values=(False,), instead="use /v1/completions"),
    "documents": Neutral(values=([],), instead="put them into the messages"),
    "chat_template": Neutral(instead="the checkpoint's own is used"),
    "media_io_kwargs": Neutral(values=({},), instead=NO_MEDIA),
    "mm_processor_kwargs": Neutral(values=({},), instead=NO_MEDIA),
}
"""Fields of messages, for answers and for tokenizing alone."""

CHAT_NEUTRAL: Mapping[str, Neutral] = {
    **COMMON_NEUTRAL,
    **TEMPLATE_NEUTRAL,
    "echo": Neutral(values=(False,), instead="only completions have it"),
    "functions": Neutral(values=([],), instead="send tools"),
    "function_call": Neutral(values=("none", "auto"), instead="send tool_choice"),
    "audio": Neutral(instead=NO_MEDIA),
    "modalities": Neutral(values=(["text"],), instead=NO_MEDIA),
    "moderation": Neutral(instead="answers are not moderated"),
    "prediction": Neutral(instead="there is no speculative decoding"),
    "return_prompt_text": Neutral(values=(False,), instead="send return_token_ids"),
    "verbosity": Neutral(values=("medium",), instead="ask for it in the messages"),
    "web_search_options": Neutral(instead="there is no web search; send tools"),
}

MESSAGE_NEUTRAL: Mapping[str, Neutral] = {
    "refusal": Neutral(),
    "audio": Neutral(instead=NO_MEDIA),
    "annotations": Neutral(values=([],)),
    "function_call": Neutral(instead="send tool_calls"),
}
"""Fields of OpenAI's messages, which an answer has when it is sent back."""
