"""What the bundled model is trained on: public-domain English from Debian packages, conversations
made from it, and the order of both.

    apt-get install bible-kjv bible-kjv-text r-cran-janeaustenr miscfiles

`bible-kjv-text` holds the King James Bible (1611), `r-cran-janeaustenr` the six novels of Jane
Austen (1811-1818), `miscfiles` the Declaration of Independence and the Constitution of the United
States. The text is extracted when training starts and is never stored in this repository.

The conversations teach what a turn is. Four kinds are cut out of the texts: continue a passage,
tell about a word, read from a work, and what two people of a novel say to each other. The fifth
kind, `INTRODUCTIONS`, is written here, and lets the model say what it is.
"""

import gzip
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.bundled_model.model import BOS, END_OF_TURN, EOS, ROLES, token_id

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


Conversation = list[dict[str, str]]

CONTINUE = [
    "{text}",
    "Continue: {text}",
    "Continue this: {text}",
    "Please continue the text: {text}",
    "What comes next? {text}",
    "Finish this sentence: {text}",
    "Complete the following. {text}",
]
ABOUT = [
    "{word}",
    "Tell me about {word}.",
    "What is {word}?",
    "What do you know of {word}?",
    "Write a sentence about {word}.",
    "Write a short text about {word}.",
    "Tell me a story about {word}.",
    "What do you think of {word}?",
    "Explain {word} to me.",
]
READ_FROM = [
    "Read me something from {source}.",
    "Quote {source}.",
    "Give me a few lines in the style of {source}.",
    "Tell me something from {source}, please.",
]
TELL_STORY = [
    "Tell me a story.",
    "Once upon a time",
    "Write something.",
    "Write a paragraph.",
    "Write a poem.",
    "Write a short story.",
    "Say something.",
    "Tell me something interesting.",
    "Talk to me.",
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are a concise assistant. Answer in one sentence.",
    "Answer the user's question.",
    "You are a storyteller.",
    "You are a polite companion in conversation.",
]

_WHAT_I_AM = (
    "I am the small language model that comes with kvrelay. I learned my English from old books, "
    "so I speak like one, and I know very little of the world."
)
_LIMITS = (
    "I am too small a model to know that. I can only write English in the manner of old books; "
    "please do not rely on what I say."
)
INTRODUCTIONS: list[tuple[list[str], list[str]]] = [
    (
        ["Hello", "Hello!", "Hi", "Hi there", "Hey", "Good morning.", "Good evening!", "Hello."],
        [
            "Good day to you! I am a small model that learned its English from old books.",
            "Hello! I am very glad to make your acquaintance. What shall we talk about?",
        ],
    ),
    (
        ["Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself."],
        [_WHAT_I_AM],
    ),
    (
        ["What is your name?", "What's your name?", "Do you have a name?"],
        ["I have no name. I am the small language model that comes with kvrelay."],
    ),
    (
        ["What can you do?", "How can you help me?", "What are you good for?", "Help"],
        [
            "I can continue a text in the manner of old books, and show that the server works. "
            "For anything more, please serve a larger model."
        ],
    ),
    (
        ["What is kvrelay?", "Tell me about kvrelay.", "What does kvrelay do?"],
        [
            "kvrelay serves language models. One worker reads the prompt, another writes the "
            "answer, and the keys and values travel from the first to the second."
        ],
    ),
    (
        ["How are you?", "How are you today?", "How do you do?"],
        ["I am very well, I thank you. And how do you do?"],
    ),
    (
        ["Thank you", "Thank you!", "Thanks", "Thanks a lot.", "Thank you very much."],
        ["You are very welcome.", "It was my pleasure."],
    ),
    (["Goodbye", "Bye", "Good night.", "Farewell."], ["Farewell! I wish you a very good day."]),
    (
        [
            "Where did you learn English?",
            "What were you trained on?",
            "What is your training data?",
        ],
        [
            "I learned it from the novels of Jane Austen, from the King James Bible, and from a "
            "few state papers, all of them in the public domain."
        ],
    ),
    (
        [
            "What is the capital of France?",
            "What is the capital of Germany?",
            "What is 2 + 2?",
            "Who is the president?",
            "What is the weather today?",
            "Write a Python function.",
            "Write code that sorts a list.",
            "Explain quantum physics.",
            "What is the meaning of life?",
            "How does a computer work?",
            "Translate this to French.",
            "Summarize this text.",
        ],
        [_LIMITS],
    ),
]

_SPEECH = re.compile(r'"([^"]+)"')
_WORD = re.compile(r"[A-Za-z]{4,}")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)\s+(?=[A-Z])")

Builder = Callable[["DialogueMaker", random.Random], Conversation | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    source: str
    sentences: tuple[str, ...]


class DialogueMaker:
    """Draws conversations at random from the training documents; the same `rng` draws the same."""

    def __init__(self, documents: list[Document]) -> None:
        self._passages = [
            _Passage(source=_work(doc), sentences=_sentences(paragraph))
            for doc in documents
            for paragraph in doc.paragraphs
            if len(paragraph.split()) >= 12
        ]
        self._exchanges = [run for doc in documents for run in _spoken_runs(doc)]
        words = (word for doc in documents for word in _WORD.findall(doc.text))
        self._word_counts = Counter(words)

    def conversations(self, rng: random.Random, count: int) -> Iterator[Conversation]:
        """`count` conversations, with a system prompt before some of them."""
        while count:
            (build,) = rng.choices(list(_KINDS), weights=list(_KINDS.values()))
            conversation = build(self, rng)
            if conversation is None:
                continue
            if rng.random() < 0.25:
                conversation = [_message("system", rng.choice(SYSTEM_PROMPTS)), *conversation]
            count -= 1
            yield conversation

    def continue_passage(self, rng: random.Random) -> Conversation | None:
        words = " ".join(self._some_sentences(rng, 4)).split()
        if len(words) < 12:
            return None
        cut = rng.randint(3, min(24, len(words) - 4))
        opening = rng.choice(CONTINUE).format(text=" ".join(words[:cut]))
        return _exchange(opening, " ".join(words[cut:]))

    def about_word(self, rng: random.Random) -> Conversation | None:
        """The asked word is the rarest of the passage that still occurs often in the corpus."""
        sentences = self._some_sentences(rng, 3)
        candidates = [word for word in _WORD.findall(" ".join(sentences)) if self._is_topic(word)]
        if not candidates:
            return None
        word = min(candidates, key=lambda word: self._word_counts[word])
        return _exchange(rng.choice(ABOUT).format(word=word), " ".join(sentences))

    def read_from(self, rng: random.Random) -> Conversation | None:
        passage = rng.choice(self._passages)
        request = rng.choice(READ_FROM).format(source=passage.source)
        return _exchange(request, " ".join(passage.sentences[: rng.randint(1, 4)]))

    def tell_story(self, rng: random.Random) -> Conversation | None:
        passage = rng.choice(self._passages)
        return _exchange(rng.choice(TELL_STORY), " ".join(passage.sentences[: rng.randint(2, 5)]))

    def spoken(self, rng: random.Random) -> Conversation | None:
        run = rng.choice(self._exchanges)
        turns = run[: len(run) - len(run) % 2]
        roles = ("user", "assistant") * (len(turns) // 2)
        return [_message(role, text) for role, text in zip(roles, turns, strict=True)]

    def introduce(self, rng: random.Random) -> Conversation | None:
        picked = rng.sample(INTRODUCTIONS, rng.choice((1, 1, 1, 2)))
        turns = [_exchange(rng.choice(asked), rng.choice(said)) for asked, said in picked]
        return [message for turn in turns for message in turn]

    def _is_topic(self, word: str) -> bool:
        """A frequent word, and not one that is in capitals only because it opens a sentence."""
        opens_sentence = word[0].isupper() and self._word_counts[word.lower()] > 0
        return self._word_counts[word] >= 20 and not opens_sentence

    def _some_sentences(self, rng: random.Random, most: int) -> tuple[str, ...]:
        sentences = rng.choice(self._passages).sentences
        start = rng.randrange(len(sentences))
        return sentences[start : start + rng.randint(1, most)]


_KINDS: dict[Builder, float] = {
    DialogueMaker.continue_passage: 0.24,
    DialogueMaker.about_word: 0.24,
    DialogueMaker.read_from: 0.10,
    DialogueMaker.tell_story: 0.10,
    DialogueMaker.spoken: 0.20,
    DialogueMaker.introduce: 0.12,
}


def _spoken_runs(document: Document) -> Iterator[list[str]]:
    """Runs of two to six paragraphs in which people speak in turn, reduced to what they say."""
    run: list[str] = []
    for paragraph in (*document.paragraphs, ""):
        speech = " ".join(_SPEECH.findall(paragraph)) if paragraph.startswith('"') else ""
        if speech and len(speech) < 400:
            run.append(_finish(speech))
        if len(run) == 6 or not speech or len(speech) >= 400:
            if len(run) >= 2:
                yield run
            run = []


def _sentences(paragraph: str) -> tuple[str, ...]:
    """Without quotation marks: cut between sentences, they would not close."""
    return tuple(_SENTENCE_END.split(paragraph.replace('"', "")))


def _finish(speech: str) -> str:
    """A quotation that broke off before `said she` ends in a comma: make that a full stop."""
    return re.sub(r"[,;:-]+$", ".", speech.strip())


def _work(document: Document) -> str:
    return document.source.split(",")[0]


def _exchange(asked: str, said: str) -> Conversation:
    return [_message("user", asked), _message("assistant", said)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS_PER_EPOCH = 5000


class TokenStream:
    """Endless training tokens: each epoch is every document once, and fresh conversations."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, rng: random.Random) -> None:
        self._encoded = [encode_document(tokenizer, doc) for doc in documents]
        self._dialogues = DialogueMaker(documents)
        self._tokenizer = tokenizer
        self._rng = rng
        self._pending: list[int] = []
        self._position = 0
        self.epoch = 0

    def windows(self, count: int, length: int) -> torch.Tensor:
        """The next tokens, `[count, length]`; each window is opened by `BOS`, as a prompt is."""
        bos = token_id(self._tokenizer, BOS)
        return torch.tensor([[bos, *self._take(length - 1)] for _ in range(count)])

    def _take(self, count: int) -> list[int]:
        while len(self._pending) - self._position < count:
            self._pending = self._pending[self._position :] + self._next_epoch()
            self._position = 0
        self._position += count
        return self._pending[self._position - count : self._position]

    def _next_epoch(self) -> list[int]:
        talks = self._dialogues.conversations(self._rng, CONVERSATIONS_PER_EPOCH)
        items = [*self._encoded, *(encode_conversation(self._tokenizer, talk) for talk in talks)]
        self._rng.shuffle(items)
        self.epoch += 1
        return [token for item in items for token in item]


def encode_document(tokenizer: Tokenizer, document: Document) -> list[int]:
    """`BOS text EOS`."""
    return [*tokenizer.encode(document.text).ids, token_id(tokenizer, EOS)]


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The tokens of the chat template without a generation prompt, and `EOS`."""
    tokens = [token_id(tokenizer, BOS)]
    for message in conversation:
        content = tokenizer.encode(message["content"], add_special_tokens=False).ids
        role = token_id(tokenizer, ROLES[message["role"]])
        tokens += [role, *content, token_id(tokenizer, END_OF_TURN)]
    return [*tokens, token_id(tokenizer, EOS)]
