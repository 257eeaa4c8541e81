"""Which model is served, and what is asked of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.bundled_model.corpus import ABOUT, TELL_STORY
from bench.live.offered import Mix
from bench.models import SMOLLM_135M, write_random_llama
from engine.bundled import checkpoint_path
from engine.model.checkpoint import find_text_files
from router.text.tokenizer import TextTokenizer

WORDS = ("love", "the sea", "a king", "war", "London")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    name: str
    folder: Path
    mix: Mix

    @property
    def text(self) -> str:
        return f"{self.name}, {self.mix.text}"

    def kv(self) -> dict[str, int]:
        """The shape of a token's KV, as a cluster file's `simulation` has it."""
        config = json.loads((self.folder / "config.json").read_text())
        return {
            "layers": config["num_hidden_layers"],
            "heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
        }


def of_bundled(mix: Mix) -> Subject:
    return Subject(name="bundled model", folder=checkpoint_path(), mix=mix)


@contextmanager
def bundled(*, own_ends: bool) -> Iterator[Subject]:
    """A decode step takes a millisecond or two, so that others' work on its core is felt."""
    yield of_bundled(Mix(questions=questions() if own_ends else ()))


def questions() -> tuple[tuple[int, ...], ...]:
    """Turns that the bundled model was trained on: its answers have 13 tokens and more, and few of
    them end behind the limit. Behind a text alone it never ends."""
    tokenizer = TextTokenizer.load(find_text_files(str(checkpoint_path()), None))
    asked = [*TELL_STORY, *(ask.format(word=word) for ask, word in product(ABOUT, WORDS))]
    turns = (f"<|user|>{question}<|end|><|assistant|>" for question in asked)
    return tuple(tokenizer.encode(turn, add_special_tokens=False) for turn in turns)


@contextmanager
def smollm(*, own_ends: bool) -> Iterator[Subject]:
    """A decode step takes ten milliseconds and more. Random weights have no ends of their own."""
    assert not own_ends, "random weights never end"
    mix = Mix(prompt_tokens=(256, 768), output_tokens=(16, 96))
    with TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), SMOLLM_135M)
        yield Subject(name="random SmolLM-135M", folder=folder, mix=mix)


SUBJECTS: dict[str, Callable[..., AbstractContextManager[Subject]]] = {
    "bundled": bundled,
    "smollm": smollm,
}
