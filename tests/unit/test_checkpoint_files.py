"""What a starting worker takes from others: by its name, its digest, and beside the hub's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.checkpoint_files import (
    JUDGE_S,
    CheckpointFile,
    CheckpointOffer,
    flaw_in,
    is_needed,
    is_slower,
)

FILE = CheckpointFile(name="config.json", digest="0" * 40, nbytes=2)
WEIGHTS = CheckpointFile(name="model.safetensors", digest="f" * 64, nbytes=10**9)
OFFER = CheckpointOffer(commit="a" * 40, files=(FILE, WEIGHTS))


def test_an_offer_that_is_taken() -> None:
    assert flaw_in(OFFER) is None
    assert flaw_in(replace(OFFER, files=(replace(FILE, name="sub/config.json"),))) is None
    assert flaw_in(replace(OFFER, files=(replace(FILE, name="..json"),))) is None


@pytest.mark.parametrize(
    "name",
    [
        *("../config.json", "sub/../../config.json", "/etc/config.json", "./config.json"),
        *("sub//config.json", "..\\config.json", "a\0.json", "../../refs/a.json", "sub/../a.json"),
    ],
)
def test_a_name_that_leads_elsewhere(name: str) -> None:
    offer = replace(OFFER, files=(WEIGHTS, replace(FILE, name=name)))
    assert "is no name of a file in a checkpoint" in (flaw_in(offer) or "")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.py", "consolidated.safetensors", ""])
def test_a_file_that_no_engine_needs(name: str) -> None:
    assert not is_needed(name)
    assert flaw_in(replace(OFFER, files=(replace(FILE, name=name),)))


@pytest.mark.parametrize("digest", ["", "0" * 39, "G" * 40, "../" + "0" * 37, "0" * 41, "A" * 64])
def test_a_digest_that_is_none(digest: str) -> None:
    offer = replace(OFFER, files=(replace(FILE, digest=digest),))
    assert "has no digest" in (flaw_in(offer) or "")


@pytest.mark.parametrize(
    ("offer", "flaw"),
    [
        (replace(OFFER, commit="../" + "a" * 37), "is no commit"),
        (replace(OFFER, commit="main"), "is no commit"),
        (replace(OFFER, files=()), "has no files"),
        (replace(OFFER, files=(FILE, FILE)), "names a file twice"),
        (replace(OFFER, files=(replace(FILE, nbytes=-1),)), "negative size"),
    ],
)
def test_what_is_not_taken(offer: CheckpointOffer, flaw: str) -> None:
    assert flaw in (flaw_in(offer) or "")


def test_slower_than_the_hub() -> None:
    assert not is_slower(0, 100.0, None), "nobody knows the hub's speed"
    assert not is_slower(0, JUDGE_S / 2, 1e9), "too early to tell"
    assert is_slower(10**9 - 1, 1.0, 1e9)
    assert not is_slower(10**9, 1.0, 1e9)
    assert is_slower(10**9, 2.0, 1e9)
