"""<think>...</think> before the answer, of DeepSeek-R1, Qwen 3 and others; [THINK]...[/THINK] of
Magistral. Pure.

After the chat templates of https://huggingface.co/deepseek-ai/DeepSeek-R1 and
https://huggingface.co/Qwen/Qwen3-8B. Some templates open the block in the prompt already.
"""

from __future__ import annotations

from enum import Enum, auto

from kvrelay.types import value
from router.chat.machines.lark import Lark
from router.chat.machines.machine import Machine
from router.chat.values.events import ReasoningText


class Begins(Enum):
    """Where an answer begins: in a block of reasoning, before one perhaps, or behind it."""

    INSIDE = auto()
    BEFORE = auto()
    BEHIND = auto()


@value
class Thinking:
    """`opens` and `closes` are the marks of a block of reasoning."""

    name: str
    opens: str
    closes: str

    def begins(self, prompt: str) -> Begins:
        """By the end of the prompt."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.opens):
            return Begins.INSIDE
        return Begins.BEHIND if prompt.endswith(self.closes) else Begins.BEFORE

    def prefix(self, lark: Lark, begins: Begins) -> str:
        """A Lark expression for the reasoning before an answer; empty if there is none."""
        if begins is Begins.BEHIND:
            return ""
        thought = lark.until("thought", self.closes)
        space = lark.rule("SPACE", r"/\s{0,4}/")
        if begins is Begins.INSIDE:
            return f"{thought} {space}"
        return f"({lark.words(self.opens)} {thought} {space})?"


THINK = Thinking(name="think", opens="<think>", closes="</think>")
MISTRAL_THINK = Thinking(name="mistral", opens="[THINK]", closes="[/THINK]")


class ThinkingMachine(Machine):
    """Reads the reasoning, and gives the rest to `inner`. Space beside the marks isn't told."""

    def __init__(self, thinking: Thinking, begins: Begins, inner: Machine) -> None:
        super().__init__()
        self._marks = thinking
        self._inner = inner
        self._space = ""
        if begins is not Begins.BEFORE:
            self._state = self._thought_begins if begins is Begins.INSIDE else self._answer

    def _begin(self) -> bool:
        said = self._text.lstrip()
        if self._marks.opens.startswith(said) and said != self._marks.opens and not self._ended:
            return False
        if said.startswith(self._marks.opens):
            self._text = said.removeprefix(self._marks.opens)
            self._state = self._thought_begins
        else:
            self._state = self._answer
        return True

    def _thought_begins(self) -> bool:
        """Some models open the block again."""
        if not self._skip_space() or self._starts((self._marks.opens,)) is None:
            return False
        self._state = self._thought
        return True

    def _thought(self) -> bool:
        text, closes = self._until((self._marks.closes,))
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._out.append(ReasoningText(text=kept))
        if closes:
            self._state = self._answer_begins
        return bool(closes)

    def _answer_begins(self) -> bool:
        if not self._skip_space():
            return False
        self._state = self._answer
        return True

    def _answer(self) -> bool:
        self._out += self._inner.push(self._take(len(self._text)))
        return True

    def _end(self) -> None:
        self._out += self._inner.push(self._take(len(self._text)))
        self._out += self._inner.finish()
