"""The router's tokenizer against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvrelay.errors import InvalidRequest, ModelError
from router.text.tokenizer import TextTokenizer
from tests.tokenizer_fixture import TEMPLATE, TEXTS, byte_fallback, byte_level

BUNDLED = Path("engine/bundled/checkpoint")
CHAT = [
    {"role": "system", "content": "  Be <brief> & kind "},
    {"role": "skip", "content": "unseen"},
    {"role": "user", "content": "Grüße 😀"},
]


@pytest.fixture(params=["byte_level", "byte_fallback", "bundled", "add_eos", "no_bos", "extra"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    match request.param:
        case "byte_level":
            return byte_level(tmp_path)
        case "byte_fallback":
            return byte_fallback(tmp_path)
        case "add_eos":
            return byte_level(tmp_path, add_bos_token=True, add_eos_token=True)
        case "no_bos":
            return byte_level(tmp_path, add_bos_token=False)
        case "extra":
            return byte_level(
                tmp_path, pad_token="<|pad|>", additional_special_tokens=["<|tool|>", "<|user|>"]
            )
        case _:
            return BUNDLED


def test_ids_and_text_equal_transformers(folder: Path) -> None:
    ours, theirs = TextTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "", " x", "<|user|>hi<|end|> there <|tool|> <|pad|>"):
        ids = ours.encode(text)
        assert list(ids) == theirs.encode(text)
        without = ours.encode(text, add_special_tokens=False)
        assert list(without) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(folder: Path, prompt: bool) -> None:
    chat = CHAT[2:] if folder == BUNDLED else CHAT
    ours, theirs = TextTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = ours.render_chat(chat, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert list(ours.encode(text, add_special_tokens=False)) == ids


def test_template_in_a_file_of_its_own_wins(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert TextTokenizer.load(tmp_path).render_chat(CHAT) == "from the file"


def test_template_named_default_of_a_list(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    byte_level(tmp_path, chat_template=named)
    assert TextTokenizer.load(tmp_path).render_chat(CHAT) == "yes"


def test_strftime_now_gives_the_year(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template="{{ strftime_now('%Y') | int > 2000 }}")
    assert TextTokenizer.load(tmp_path).render_chat(CHAT) == "True"


def test_template_is_sandboxed(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest, match="refused the messages"):
        TextTokenizer.load(tmp_path).render_chat(CHAT)


def test_template_refusal_has_its_own_words(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(byte_level(tmp_path))
    with pytest.raises(InvalidRequest, match="refused the messages: no tools here") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


def test_no_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(byte_level(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest, match=r"no chat template: use /v1/completions") as caught:
        tokenizer.render_chat(CHAT)
    assert caught.value.code == "no_chat_template"


def test_broken_template_is_refused_at_load(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template=TEMPLATE + "{% if %}")
    with pytest.raises(ModelError, match="chat template doesn't parse"):
        TextTokenizer.load(tmp_path)


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(ModelError, match="can't be loaded"):
        TextTokenizer.load(tmp_path)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        TextTokenizer.load(byte_level(tmp_path)).encode("a\ud83d")


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text(kind, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = TextTokenizer.load(kind(tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert joined.removeprefix(" ") == text.removeprefix(" ")
    assert tokenizer.token_text(tokenizer.backend.token_to_id("<|user|>")) == "<|user|>"
