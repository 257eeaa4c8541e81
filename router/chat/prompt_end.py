"""How the prompt of a chat ends: some templates open or close a block of reasoning there."""

from __future__ import annotations

from kvrelay.errors import InvalidRequest
from router.chat.formats.thinking import Begins
from router.chat.values.form import ChatForm
from router.text.service import TextService

LAST_TOKENS = 16
PROBE = ({"role": "user", "content": "?"},)


def begins_of(service: TextService, form: ChatForm) -> Begins:
    """Where an answer begins. The end depends on the template's variables and not on the messages,
    so a short chat shows it."""
    thinking = service.formats.reasoning
    return Begins.BEHIND if thinking is None else thinking.begins(_end(service, form))


def _end(service: TextService, form: ChatForm) -> str:
    tokenizer = service.tokenizer
    if form.prompt_ids:
        return tokenizer.decode(form.prompt_ids[-LAST_TOKENS:], skip_special_tokens=False)
    if not form.add_generation_prompt:
        return ""
    try:
        return tokenizer.render_chat(PROBE, template_kwargs=form.template_kwargs or {})
    except InvalidRequest:
        return ""
