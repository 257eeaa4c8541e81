"""The tokens of a text that still grows, as far as what is to come will hardly change them.

Only what is new is tokenized, from some tokens before the last border on. There the old tokens and
the new ones must agree, or the whole text is tokenized again. The result is a guess: a later
character can still change how earlier ones are merged. It is used for computing ahead only, and the
prompt itself is tokenized as a whole when it is complete: a wrong guess costs time, no exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

OVERLAP_TOKENS = 64
"""So many old tokens are tokenized again."""
AGREEING_TOKENS = 4
"""So many in a row must be the same before the new ones are believed."""
UNSTABLE_TOKENS = 16
"""The last tokens of the text so far: what follows may be merged with them."""


class PlacedToken(NamedTuple):
    """A token, and the character of the text at which it begins."""

    token_id: int
    start: int


class StableTokens:
    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._text = ""
        self._tokens: list[PlacedToken] = []

    def grow(self, text: str) -> None:
        """`text` follows what came before. Takes milliseconds: not for an event loop."""
        self._text += text
        first = max(0, len(self._tokens) - OVERLAP_TOKENS)
        if not first or not self._try_append(first):
            whole = self._encoded(self._text, add_special_tokens=self._add_special_tokens)
            self._tokens = _placed(whole, 0)

    def _encoded(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """As a batch of one: only a batch lets other threads run meanwhile."""
        found = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return found[0]

    def stable_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self._tokens[:-UNSTABLE_TOKENS])

    def _try_append(self, first: int) -> bool:
        """Tokenizes from the token `first` on; False: that does not fit the tokens before."""
        begin = self._tokens[first].start
        encoding = self._encoded(self._text[begin:], add_special_tokens=False)
        new = _placed(encoding, begin)
        border = _border(self._tokens[first:], new)
        if border is None:
            return False
        old, at = border
        self._tokens[first + old :] = new[at:]
        return True


def _placed(encoding: Encoding, begin: int) -> list[PlacedToken]:
    """Without special tokens that the tokenizer puts behind a text."""
    last = len(encoding.ids)
    while last and encoding.special_tokens_mask[last - 1]:
        last -= 1
    starts = [begin + start for start, _ in encoding.offsets[:last]]
    return list(map(PlacedToken, encoding.ids[:last], starts))


def _border(old: Sequence[PlacedToken], new: Sequence[PlacedToken]) -> tuple[int, int] | None:
    """Positions in both from which on they agree for a while; None: they nowhere do. The first
    tokens of `new` are not looked at: it begins in the middle of a text."""
    places = {token: at for at, token in enumerate(new) if at >= AGREEING_TOKENS}
    for position in range(AGREEING_TOKENS, len(old) - AGREEING_TOKENS + 1):
        at = places.get(old[position])
        if at is not None and _agree(old, position, new, at):
            return position, at
    return None


def _agree(old: Sequence[PlacedToken], i: int, new: Sequence[PlacedToken], k: int) -> bool:
    return old[i : i + AGREEING_TOKENS] == new[k : k + AGREEING_TOKENS]
