"""Incremental detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer, StopStrings, TextStream
from router.text.tokenizer import TextTokenizer
from tests.tokenizer_fixture import CROSSING, TEXTS, byte_fallback, byte_level

BROKEN = "\ufffd"


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextTokenizer:
    return TextTokenizer.load(request.param(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(byte_level(tmp_path_factory.mktemp("tokenizer")))


def streamed(stream: TextStream, ids: Sequence[int], step: int = 1) -> list[str]:
    pieces = [stream.push(ids[i : i + step]).text for i in range(0, len(ids), step)]
    return [*pieces, stream.finish().text]


words = st.sampled_from([word for text in TEXTS for word in text.split(" ")])
characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
texts = st.lists(st.one_of(words, characters), max_size=40).map(" ".join)


@settings(max_examples=150)
@given(text=texts, step=st.integers(1, 4), skip=st.booleans())
def test_deltas_join_to_the_whole_and_no_character_is_split(
    tokenizer: TextTokenizer, text: str, step: int, skip: bool
) -> None:
    ids = tokenizer.encode(text + "<|user|>" + text + "<|end|>")
    pieces = streamed(TextStream(tokenizer, skip_special_tokens=skip), ids, step)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 600), max_size=60))
def test_nonsense_of_a_byte_level_model_joins_to_the_whole(
    bytewise: TextTokenizer, ids: list[int]
) -> None:
    pieces = streamed(TextStream(bytewise), ids)
    assert "".join(pieces) == bytewise.decode(ids)


@pytest.mark.parametrize("strays", range(6, 20))
def test_a_character_behind_stray_bytes_is_whole(bytewise: TextTokenizer, strays: int) -> None:
    stray = bytewise.encode("😀", add_special_tokens=False)[1]
    ids = [stray] * strays + [*bytewise.encode("¡😀", add_special_tokens=False)]
    pieces = streamed(TextStream(bytewise), ids)
    assert "".join(pieces) == bytewise.decode(ids) == BROKEN * strays + "¡😀"


def test_text_comes_as_soon_as_it_is_certain(bytewise: TextTokenizer) -> None:
    ids = bytewise.encode("a😀b", add_special_tokens=False)
    pieces = streamed(TextStream(bytewise), ids)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]
    assert pieces[0] == "a"
    assert pieces[-2:] == ["b", ""]


def test_an_unfinished_character_comes_at_the_end(bytewise: TextTokenizer) -> None:
    ids = bytewise.encode("a😀", add_special_tokens=False)[:-1]
    assert streamed(TextStream(bytewise), ids)[-1] == BROKEN


def test_bytes_that_never_become_text_do_not_pile_up(bytewise: TextTokenizer) -> None:
    stray = bytewise.encode("😀", add_special_tokens=False)[1]
    stream = TextStream(bytewise)
    sent = "".join(stream.push([stray]).text for _ in range(100))
    assert len(sent) > 80
    assert len(sent + stream.finish().text) == 100


def crossing_ids(tokenizer: TextTokenizer, count: int) -> list[int]:
    """count + 1 emoji; every token but the outer ones ends inside a character."""
    first, second, third, last = tokenizer.encode("😀", add_special_tokens=False)
    crossing = tokenizer.backend.token_to_id(CROSSING)
    return [first, second, third, *[crossing] * count, last]


def test_tokens_that_cross_characters_pass_through(bytewise: TextTokenizer) -> None:
    pieces = streamed(TextStream(bytewise), crossing_ids(bytewise, 200))
    assert "".join(pieces) == "😀" * 201
    assert pieces[2:5] == ["", "😀", "😀"]


@pytest.mark.parametrize("text", ["the earth and ", "😀", "漢", CROSSING])
def test_work_per_token_does_not_grow(
    bytewise: TextTokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens decoded, and characters looked through for stop strings."""
    sizes: list[int] = []
    for owner, name in ((Detokenizer, "_decode"), (StopStrings, "push")):
        monkeypatch.setattr(owner, name, _sized(getattr(owner, name), sizes))
    if text == CROSSING:
        ids: Sequence[int] = crossing_ids(bytewise, 6000)
    else:
        ids = bytewise.encode(text * 2000, add_special_tokens=False)
    stream = TextStream(bytewise, stop_strings=["never said"])
    quarter = len(ids) // 4

    def work(part: Sequence[int]) -> int:
        sizes.clear()
        for token_id in part:
            stream.push((token_id,))
        return sum(sizes)

    first = work(ids[:quarter])
    work(ids[quarter:-quarter])
    assert 0 < work(ids[-quarter:]) < 1.1 * first


def _sized(work: Callable[..., object], sizes: list[int]) -> Callable[..., object]:
    def noted(owner: object, given: Sequence[object], **options: object) -> object:
        sizes.append(len(given))
        return work(owner, given, **options)

    return noted


def run_until_stop(
    tokenizer: TextTokenizer, text: str, stops: Sequence[str], **options: object
) -> tuple[list[str], str | None, int]:
    """(pieces, stop string, valid tokens)"""
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop_strings=stops, **options)  # type: ignore[arg-type]
    pieces = []
    for token_id in ids:
        delta = stream.push([token_id])
        pieces.append(delta.text)
        if delta.stopped is not None:
            return pieces, delta.stopped.stop_string, delta.stopped.valid_tokens
    return [*pieces, stream.finish().text], None, len(ids)


def test_stop_string_across_tokens_is_never_sent(bytewise: TextTokenizer) -> None:
    pieces, stop, valid = run_until_stop(bytewise, "abc xyz STOP more", ["z STO"])
    assert ("".join(pieces), stop) == ("abc xy", "z STO")
    ids = bytewise.encode("abc xyz STOP more", add_special_tokens=False)
    assert "z STO" in bytewise.decode(ids[:valid])
    assert "z STO" not in bytewise.decode(ids[: valid - 1])


def test_a_beginning_that_leads_nowhere_is_sent(bytewise: TextTokenizer) -> None:
    pieces, stop, _ = run_until_stop(bytewise, "aaab aab", ["aabb", "b!"])
    assert ("".join(pieces), stop) == ("aaab aab", None)


def test_stop_string_is_kept_when_asked_for(bytewise: TextTokenizer) -> None:
    pieces, stop, _ = run_until_stop(
        bytewise, "abc xyz STOP more", ["z STO"], include_stop_str_in_output=True
    )
    assert ("".join(pieces), stop) == ("abc xyz STO", "z STO")


def test_the_first_to_end_wins_and_of_equals_the_longest(bytewise: TextTokenizer) -> None:
    assert run_until_stop(bytewise, "one two three", ["three", "o t"])[1] == "o t"
    assert run_until_stop(bytewise, "one two three", ["wo", "two"])[1] == "two"


def test_stop_strings_wait_for_min_tokens(bytewise: TextTokenizer) -> None:
    pieces, stop, valid = run_until_stop(bytewise, "ab! cd! ef! gh", ["!"], min_tokens=6)
    assert (stop, valid >= 6) == ("!", True)
    assert "".join(pieces).startswith("ab! cd")


def test_one_push_of_many_tokens_stops_at_the_right_one(bytewise: TextTokenizer) -> None:
    ids = bytewise.encode("ab cd! ef gh", add_special_tokens=False)
    delta = TextStream(bytewise, stop_strings=["!"]).push(ids)
    assert delta.text == "ab cd"
    assert delta.stopped is not None
    assert bytewise.decode(ids[: delta.stopped.valid_tokens]) == "ab cd!"


@settings(max_examples=200)
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stops_agree_with_a_search_of_the_whole_text(
    bytewise: TextTokenizer, text: str, stops: list[str]
) -> None:
    pieces, stop, _ = run_until_stop(bytewise, text, stops)
    ends = [text.index(s) + len(s) for s in stops if s in text]
    if not ends:
        assert ("".join(pieces), stop) == (text, None)
    else:
        longest = max((s for s in stops if text[: min(ends)].endswith(s)), key=len)
        assert stop == longest
        assert "".join(pieces) == text[: min(ends) - len(longest)]
