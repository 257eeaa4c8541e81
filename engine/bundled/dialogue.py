"""Conversations made from the corpus, so that the bundled model knows what a turn is.

Four kinds are cut out of the novels, the Bible and the state papers: continue a passage, tell
about a word, read from a work, and what two people of a novel say to each other. The fifth kind,
`INTRODUCTIONS`, is written here, and lets the model say what it is.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.bundled.corpus import Document

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
