"""The public-domain English that the bundled model is trained on, read from Debian packages.

    apt-get install bible-kjv bible-kjv-text r-cran-janeaustenr miscfiles

`bible-kjv-text` holds the King James Bible (1611), `r-cran-janeaustenr` the six novels of Jane
Austen (1811-1818), `miscfiles` the Declaration of Independence and the Constitution of the United
States. The text is extracted when training starts and is never stored in this repository.
"""

import gzip
import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

NOVELS = {
    "Sense and Sensibility": "sensesensibility",
    "Pride and Prejudice": "prideprejudice",
    "Mansfield Park": "mansfieldpark",
    "Emma": "emma",
    "Northanger Abbey": "northangerabbey",
    "Persuasion": "persuasion",
}
STATE_PAPERS = {
    "the Declaration of Independence": Path("/usr/share/state/us-declaration.gz"),
    "the Constitution": Path("/usr/share/state/us-constitution.gz"),
}
VERSES_PER_PARAGRAPH = 4

_CHAPTER = re.compile(r"^chapter\s+\w+\s*$", re.IGNORECASE | re.MULTILINE)
# What follows the last chapter of a novel: the closing words, or a modern editor's note.
_AFTERWORD = re.compile(
    r"^\s*(?:THE END|FINIS|A NOTE ON THE TEXT)\s*$", re.IGNORECASE | re.MULTILINE
)
_VOLUME = re.compile(r"^\s*(?:VOLUME\s+\w+|End of .*)\s*$", re.IGNORECASE | re.MULTILINE)
_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):\d+ (.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One chapter, or one state paper: `paragraphs` in reading order, of the work `source`."""

    source: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The document as the model sees it, with a blank line between paragraphs."""
        return "\n\n".join(self.paragraphs)


def load_corpus() -> list[Document]:
    """Every document, in a fixed order; raises `FileNotFoundError` where a package is missing."""
    return [*_novels(), *_bible(), *_state_papers()]


def split_held_out(
    documents: list[Document], *, every: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents: one whole document in `every` is held out."""
    shuffled = random.Random(seed).sample(documents, len(documents))
    held_out = shuffled[::every]
    return [doc for index, doc in enumerate(shuffled) if index % every], held_out


def _novels() -> Iterator[Document]:
    for title, variable in NOVELS.items():
        program = f'cat(enc2utf8(janeaustenr::{variable}), sep="\\n")'
        book = _AFTERWORD.split(_output_of("Rscript", "-e", program))[0]
        for chapter in _CHAPTER.split(book)[1:]:
            yield Document(source=title, paragraphs=_paragraphs(_VOLUME.sub("", chapter)))


def _bible() -> Iterator[Document]:
    lines = _output_of("bible", "-f", "gen1:1-rev22:21").splitlines()
    verses = [match.groups() for line in lines if (match := _VERSE.match(line))]
    for (book, _), chapter in groupby(verses, key=lambda verse: verse[:2]):
        text = [verse for _, _, verse in chapter]
        paragraphs = tuple(" ".join(group) for group in _groups(text))
        yield Document(source=f"the Bible, {book}", paragraphs=paragraphs)


def _state_papers() -> Iterator[Document]:
    for title, path in STATE_PAPERS.items():
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
        yield Document(source=title, paragraphs=_paragraphs(text))


def _paragraphs(text: str) -> tuple[str, ...]:
    """Paragraphs without line breaks, and without the underscores that stand for italics."""
    blocks = re.split(r"\n\s*\n", text.replace("_", ""))
    return tuple(" ".join(block.split()) for block in blocks if block.strip())


def _groups(verses: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(verses), VERSES_PER_PARAGRAPH):
        yield verses[start : start + VERSES_PER_PARAGRAPH]


def _output_of(*command: str) -> str:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        command, env=environment, capture_output=True, check=True, stdin=subprocess.DEVNULL
    ).stdout.decode("utf-8")
