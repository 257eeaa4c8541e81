"""Checkpoint folders without weights whose chat templates show tools in each family's way.

The templates are ours and small; each follows the public convention that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.tokenizer_fixture import byte_level

# https://github.com/NousResearch/Hermes-Function-Calling; https://huggingface.co/Qwen/Qwen3-8B
HERMES = """\
{% if tools %}<|system|># Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Answer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>{{ eos_token }}
{% endif %}
{% for message in messages %}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

# https://huggingface.co/Qwen/Qwen3-8B (enable_thinking) and Qwen/Qwen3-4B-Thinking-2507
THINKING = (
    HERMES.rstrip()
    + """
{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif add_generation_prompt and opens is defined %}<think>
{% endif %}
"""
)

# https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
QWEN3_CODER = """\
{% if tools %}<|system|>{% for tool in tools %}
<function><name>{{ tool.function.name }}</name>
{%- for key, value in tool.function.parameters.properties | items %}
<parameter><name>{{ key }}</name><type>{{ value.type }}</type></parameter>{% endfor %}</function>
{%- endfor %}
Answer with <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n\
</tool_call>{{ eos_token }}
{% endif %}
{% for message in messages %}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

# https://github.com/meta-llama/llama-models, models/llama3_1/prompt_format.md
LLAMA3 = """\
{% if tools %}<|system|>
{%- for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}
Respond in the format {"name": function name, "parameters": dictionary of its arguments}.
{{- eos_token }}
{% endif %}
{% for message in messages %}
<|{{ message.role }}|>
{%- if message.tool_calls %}<|python_tag|>{"name": "{{ message.tool_calls[0].function.name }}", \
"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

# https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3
MISTRAL_LIST = """\
{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for message in messages %}
{% if message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, \
"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}
{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}
{% endfor %}
"""

# https://huggingface.co/mistralai/Mistral-Small-3.2-24B-Instruct-2506 and Magistral-Small-2507
MISTRAL = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for message in messages %}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]\
{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}
"""

# https://cookbook.openai.com/articles/openai-harmony; https://huggingface.co/openai/gpt-oss-20b
HARMONY = """\
{% for message in messages %}
{% if message.role == "tool" %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>\
{{ message.content }}<|end|>
{%- elif message.tool_calls %}
{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}\
<|end|>{% endif %}<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}\
<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{% endfor %}
{% if tools %}<|start|>developer<|message|>{% for tool in tools %}// {{ tool.function.description }}
type {{ tool.function.name }} = {{ tool.function.parameters | tojson }}
{% endfor %}<|end|>{% endif %}
{% if add_generation_prompt %}<|start|>assistant{% endif %}
"""

# https://huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-7B: it opens the block itself
R1 = """\
{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|><think>
{% endif %}
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    template: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


HARMONY_MARKS = ("start", "end", "message", "channel", "constrain", "return", "call")
HERMES_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

FAMILIES: Mapping[str, Family] = {
    "hermes": Family(template=HERMES, plain=HERMES_MARKS),
    "thinking": Family(template=THINKING, plain=HERMES_MARKS),
    "qwen3-coder": Family(template=QWEN3_CODER, plain=HERMES_MARKS),
    "llama3": Family(template=LLAMA3, special=("<|python_tag|>",)),
    "mistral-list": Family(template=MISTRAL_LIST, special=("[TOOL_CALLS]",)),
    "mistral": Family(template=MISTRAL, special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "harmony": Family(template=HARMONY, special=tuple(f"<|{m}|>" for m in HARMONY_MARKS)),
    "r1": Family(template=R1, special=("<think>", "</think>")),
}


def checkpoint_of(name: str, folder: Path) -> Path:
    """A tokenizer of bytes, with the family's marks as tokens, and its template."""
    family = FAMILIES[name]
    byte_level(folder, chat_template=family.template)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in family.plain])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in family.special])
    tokenizer.save(path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return folder
