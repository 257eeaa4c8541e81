"""A chat's form becomes a request: its prompt, and what its answer must match."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.errors import InvalidRequest
from router.chat.form import ChatForm
from router.text.service import ChatPrompt, TextRequest, TextService


def chat_request(service: TextService, form: ChatForm, asked: TextRequest) -> TextRequest:
    """`asked` with the prompt and the grammar of `form`. Raises InvalidRequest."""
    if not form.messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    prompt = ChatPrompt(
        form.messages,
        add_generation_prompt=form.add_generation_prompt,
        template_kwargs=form.template_kwargs or {},
        add_special_tokens=form.add_special_tokens,
    )
    sampling = replace(asked.sampling, grammar=form.grammar or asked.sampling.grammar)
    return replace(asked, prompt=prompt, sampling=sampling)
