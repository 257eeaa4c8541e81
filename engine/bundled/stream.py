"""The order of the training tokens: documents and conversations, shuffled anew for each epoch."""

import random

import torch
from tokenizers import Tokenizer

from engine.bundled.corpus import Document
from engine.bundled.dialogue import Conversation, DialogueMaker
from engine.bundled.tokenizer import BOS, END_OF_TURN, EOS, ROLES, token_id

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
