"""Masks of structured output: what may be drawn, what ends a choice, and what is replayed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.core.step import Sampled, SampleRequest, SequenceSlice, finish_reason
from engine.sampling import grammars as module
from engine.sampling.grammars import Grammars, Masks, open_grammars
from engine.sampling.sampler import draw
from kvrelay.types import FinishReason, RequestKey, Sampling
from router.text.grammar.grammars import grammar_of_choices, grammar_of_lark, grammar_of_regex
from tests.byte_tokens import EOS, byte_tokenizer

VOCAB = 300  # wider than the tokenizer


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(VOCAB), vocab=VOCAB, eos_ids=[EOS])


def piece(
    grammar: str, emitted: str = "", *, name: str = "r", choice: int = 0, **asked: object
) -> SequenceSlice:
    fields: dict[str, object] = {"max_tokens": 99, "seed": 1, "stop_token_ids": (EOS,), **asked}
    sampling = Sampling(grammar=grammar, **fields)  # type: ignore[arg-type]
    request = SampleRequest(
        sampling=sampling,
        choice=choice,
        prompt_ids=(),
        emitted_ids=tuple(emitted.encode()),
    )
    return SequenceSlice(
        key=RequestKey(name, 0),
        choice=choice,
        token_ids=(1,),
        start=0,
        tables=(),
        samples=(request,) * sampling.n,
        index=len(emitted),
    )


def unknown(index: int) -> int:
    raise AssertionError("no slice follows another")


def masks_of(grammars: Grammars, *slices: SequenceSlice) -> Masks:
    masks = grammars.masks(slices, unknown)
    assert masks is not None
    return masks


def allowed(masks: Masks, row: int = 0) -> str:
    """Characters, with $ for the end of sequence."""
    at = masks.rows.index(row)
    flags = np.unpackbits(masks.allowed[at].view(np.uint8), bitorder="little")[:VOCAB]
    return "".join("$" if i == EOS else chr(i) for i in np.flatnonzero(flags))


def test_no_grammar_no_mask(grammars: Grammars) -> None:
    assert grammars.masks([piece("")], unknown) is None


def test_only_what_goes_on_or_ends_is_allowed(grammars: Grammars) -> None:
    grammar = grammar_of_choices(["cab", "car", "ca"])
    assert allowed(masks_of(grammars, piece(grammar))) == "c"
    assert allowed(masks_of(grammars, piece(grammar, "ca"))) == "br$"
    assert allowed(masks_of(grammars, piece(grammar, "cab"))) == "$"


def test_any_history_gives_the_mask_of_a_replay(grammars: Grammars) -> None:
    """As after a failover, a preemption, or where choices part."""
    grammar = grammar_of_regex("(ab|ac)*d")
    for history in ["", "a", "ab", "", "aca", "ac", "abac", "abab"]:
        seen = allowed(masks_of(grammars, piece(grammar, history)))
        anew = Grammars(grammars.tokenizer, vocab=VOCAB, eos_ids=[EOS])
        assert seen == allowed(masks_of(anew, piece(grammar, history)))
        anew.close()


def test_choices_and_requests_are_apart(grammars: Grammars) -> None:
    grammar = grammar_of_choices(["xa", "yb"])
    first = piece(grammar, "x", choice=0)
    second = piece(grammar, "y", choice=1)
    other = piece(grammar_of_choices(["q"]), name="other")
    free = piece("")
    masks = masks_of(grammars, first, free, second, other)
    assert masks.rows == (0, 2, 3)
    assert [allowed(masks, row) for row in masks.rows] == ["a", "b", "q"]


def test_min_tokens_holds_the_end_back_while_anything_else_is_left(grammars: Grammars) -> None:
    grammar = grammar_of_choices(["a", "ab"])
    assert allowed(masks_of(grammars, piece(grammar, "a", min_tokens=5))) == "b"
    assert {*allowed(masks_of(grammars, piece(grammar, "a", min_tokens=1)))} == {"b", "$"}
    assert allowed(masks_of(grammars, piece(grammar, "ab", min_tokens=5))) == "$"


def test_ignored_end_is_held_back_and_then_ends_nevertheless(grammars: Grammars) -> None:
    grammar = grammar_of_choices(["a", "ab"])
    asked = {"stop_token_ids": ()}
    assert allowed(masks_of(grammars, piece(grammar, "a", **asked))) == "b"
    masks = masks_of(grammars, piece(grammar, "ab", **asked))
    assert allowed(masks) == "$" and masks.ends(0, EOS) and not masks.ends(0, ord("a"))


def test_own_stop_id_that_the_grammar_needs_wins_over_min_tokens(grammars: Grammars) -> None:
    stops = {"stop_token_ids": (EOS, ord("b")), "min_tokens": 9}
    assert allowed(masks_of(grammars, piece(grammar_of_choices(["ab"]), "a", **stops))) == "b"


def test_model_without_an_end_of_sequence_id() -> None:
    """One more id, which the logits don't have, stands for the end."""
    grammars = Grammars(byte_tokenizer(VOCAB + 1, eos_id=VOCAB), vocab=VOCAB)
    asked = {"stop_token_ids": ()}
    grammar = grammar_of_choices(["a", "ab"])
    assert allowed(masks_of(grammars, piece(grammar, "a", **asked))) == "b"
    masks = masks_of(grammars, piece(grammar, "ab", **asked))
    assert masks.exhausted == {0} and masks.ends(0, 7)
    ended = piece(grammar, "ab", **asked)
    drawn = draw(torch.zeros(1, VOCAB), [ended.samples], [ended.index], masks).sampled()
    (one,) = drawn[0]
    sampling = piece(grammar, **asked).samples[0].sampling
    assert finish_reason(sampling, one, emitted=3) is FinishReason.STOP
    grammars.close()


def test_a_history_that_the_grammar_forbids_fails_its_slice_alone(grammars: Grammars) -> None:
    bad, good = piece(grammar_of_regex("a+"), "zz", name="bad"), piece(grammar_of_regex("b"))
    masks = masks_of(grammars, bad, good)
    assert list(masks.failed) == [0] and "'z' fails" in masks.failed[0]
    assert "\n" not in masks.failed[0]
    assert masks.rows == (1,) and allowed(masks, 1) == "b"
    assert list(masks_of(grammars, bad).failed) == [0], "and it stays so"


def test_a_grammar_that_does_not_compile_fails_its_slice(grammars: Grammars) -> None:
    masks = masks_of(grammars, piece(grammar_of_lark("start: nowhere")))
    assert "nowhere" in masks.failed[0]


def test_without_a_tokenizer_the_slice_fails_with_the_reason() -> None:
    grammars = Grammars(None, vocab=VOCAB, reason="no such file")
    grammars.prepare(grammar_of_regex("a"))
    masks = masks_of(grammars, piece(grammar_of_regex("a")), piece(""))
    assert masks.failed == {0: "no such file"} and masks.rows == ()


def test_draws_stay_within_the_mask_and_else_are_those_of_the_free_row(grammars: Grammars) -> None:
    """The noise belongs to the id, so a draw that is allowed is the same draw."""
    torch.manual_seed(0)
    grammar = grammar_of_regex("[a-m]*")
    logits = torch.randn(1, VOCAB)
    for seed in range(40):
        asked = {"temperature": 1.0, "seed": seed}
        bound, free = piece(grammar, **asked), piece("", **asked)
        masks = masks_of(grammars, bound)
        (one,) = draw(logits, [bound.samples], [0], masks).sampled()[0]
        assert one.token_id in {*range(ord("a"), ord("m") + 1), EOS}
        shut = torch.full_like(logits, float("-inf"))
        ids = [*range(ord("a"), ord("m") + 1), EOS]
        shut[0, ids] = logits[0, ids]
        assert one.token_id == draw(shut, [free.samples], [0]).sampled()[0][0].token_id


def test_all_choices_of_a_prompt_share_the_mask_and_others_are_untouched(
    grammars: Grammars,
) -> None:
    bound = piece(grammar_of_choices(["c", "d"]), n=3, logprobs=5)
    free = piece("", name="free")
    logits = torch.zeros(2, VOCAB)
    logits[1, 7] = 1.0
    masks = masks_of(grammars, bound, free)
    drawn = draw(logits, [bound.samples, free.samples], [0, 0], masks).sampled()
    assert [one.token_id for one in drawn[0]] == [ord("c")] * 3
    assert drawn[1] == (Sampled(token_id=7),)
    told = drawn[0][0].logprobs
    assert told is not None
    assert dict(told.top) == pytest.approx({ord("c"): np.log(0.5), ord("d"): np.log(0.5)})
    assert not logits[0].isinf().any(), "the step's logits are left as they are"


@pytest.mark.parametrize("rows", [[0], [1, 0]])
def test_the_device_applies_the_bits_that_the_host_applies(
    grammars: Grammars, rows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations of a GPU, on the CPU."""
    masks = masks_of(grammars, *[piece(grammar_of_regex("[a-m]"), name=str(i)) for i in rows])
    logits = torch.randn(len(rows), VOCAB)
    flat = [[i] for i in range(len(rows))]
    on_host = masks.applied(logits, flat)
    monkeypatch.setattr("engine.sampling.grammars.host_draw", lambda: None)
    assert torch.equal(masks.applied(logits, flat), on_host)
    assert on_host.isfinite().sum() == 13 * len(rows)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4096])
def test_the_kernel_masks_as_torch_does(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five requests two are free and two share a row of bits; words may be full or empty."""
    rng = np.random.default_rng(vocab)
    bits = rng.integers(-(2**31), 2**31, (2, -(-vocab // 32) + 1)).astype(np.int32)
    bits[0, ::3], bits[1, ::4] = 0, -1
    masks = Masks(rows=(2, 0), allowed=bits, exhausted=frozenset(), eos_ids=frozenset(), failed={})
    logits, flat = torch.randn(5, vocab), [[0], [1], [2, 3], [4]]
    on_host = masks.applied(logits, flat)
    monkeypatch.setattr("engine.sampling.grammars.host_draw", lambda: None)
    assert torch.equal(masks.applied(logits, flat), on_host)
    assert torch.equal(on_host[[1, 4]], logits[[1, 4]])


def test_a_slice_that_follows_another_waits_for_its_token(grammars: Grammars) -> None:
    from dataclasses import replace

    grammar = grammar_of_choices(["xa", "yb"])
    ahead = replace(piece(grammar), follows=0)
    masks = grammars.masks([ahead], lambda index: ord("y") if index == 0 else 0)
    assert masks is not None and allowed(masks) == "b"


def test_a_step_waits_for_its_own_grammar_only(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are compiled ahead may be many, and slow."""
    go_on, compile_it = threading.Event(), grammars._compile

    def slow(grammar: str) -> object:
        assert "b" not in grammar or go_on.wait(30)
        return compile_it(grammar)

    monkeypatch.setattr(grammars, "_compile", slow)
    for number in range(3 * module.MOST_COMPILED):
        grammars.prepare(grammar_of_regex("b" * (number + 1)))
    needed = grammar_of_regex("[xy]")
    grammars.prepare(needed)
    assert allowed(masks_of(grammars, piece(needed))) == "xy"
    go_on.set()
    grammars.close()


def test_old_places_and_grammars_are_forgotten(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_STEPS", 4)
    monkeypatch.setattr(module, "MOST_COMPILED", 3)
    for i in range(40):
        masks_of(grammars, piece(grammar_of_choices([f"c{i}"]), name=str(i)))
    assert len(grammars._places) <= 8 and len(grammars._compiled) == 3


def test_folder_without_a_usable_tokenizer(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert "no tokenizer.json" in open_grammars(tmp_path, VOCAB, [0]).reason
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "can't be used" in open_grammars(tmp_path, VOCAB, [0]).reason
