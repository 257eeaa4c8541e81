"""The same exactness on a CUDA device."""

from __future__ import annotations

import pytest

from tests.drive import run_mixed, start
from tests.models import FAMILIES
from tests.reference import assert_same_tokens
from tests.unit.test_engine_exact import CHUNK_TOKENS, TOKENS, Case, check_alone, load_case

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load_case(tmp_path_factory, request.param, device="cuda")


def test_logits_of_sequences_alone(case: Case) -> None:
    for reference in case.references:
        check_alone(case.engine, reference)


def test_tokens_in_mixed_batches(case: Case) -> None:
    sequences = start(case.engine, [r.prompt for r in case.references], max_tokens=TOKENS)
    run_mixed(case.engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(case.references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)
