"""Every causal family of the installed transformers: transformers' tokens, or a named refusal.

`engine/support/families.txt` says which, family by family, for the transformers that it names. With
another one a family may come or go, but none may be served with wrong tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from engine.support.matrix import support_matrix
from tests.families.kit import family_names
from tests.families.walk import outcome

_SAMPLE = {
    "codegen",
    *("camembert", "diffllama", "doge", "falcon", "gemma3", "glm_moe_dsa", "llama4", "moshi"),
    *("phimoe", "qwen3_next", "deepseek_v3", "gemma3n_text", "gpt_oss", "llama", "longcat_flash"),
}
"""What `make test` runs: each kind of refusal and some that are served."""


MATRIX = support_matrix()
VERSION = MATRIX.transformers
EXPECTED = {family.name: family.check for family in MATRIX.families}
IS_SAME_VERSION = transformers.__version__.rsplit(".", 1)[0] == VERSION


@pytest.mark.skipif(not IS_SAME_VERSION, reason=f"the list is of transformers {VERSION}")
def test_the_list_is_complete() -> None:
    assert tuple(EXPECTED) == family_names()


def test_the_sample_has_every_kind_of_outcome() -> None:
    assert {EXPECTED[family] for family in _SAMPLE} == set(EXPECTED.values())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in _SAMPLE else pytest.mark.families)
        for family in family_names()
    ],
)
def test_a_family_is_exact_or_refused(family: str, tmp_path: Path) -> None:
    found = outcome(family, tmp_path)
    if IS_SAME_VERSION:
        assert found == EXPECTED[family]
