"""What a step computes, from its slices."""

from __future__ import annotations

from engine.core.step import SequenceSlice, StepBatch
from engine.core.step_times import StepWork, decode_work, prefill_work
from kvrelay.types import RequestKey


def piece(tokens: int, start: int) -> SequenceSlice:
    ids = (0,) * tokens
    return SequenceSlice(key=RequestKey("r", 0), choice=0, token_ids=ids, start=start, tables=())


def work(*pieces: SequenceSlice) -> StepWork:
    return StepBatch(slices=pieces).work


def test_decodes_count_their_contexts() -> None:
    assert work(piece(1, 7), piece(1, 0), piece(1, 20)) == decode_work(3, 27)


def test_chunks_count_tokens_and_pairs() -> None:
    assert work(piece(8, 0), piece(4, 16)) == prefill_work(8) + prefill_work(4, 16)


def test_mixed_steps_count_both() -> None:
    assert work(piece(1, 7), piece(4, 16), piece(1, 1)) == decode_work(2, 8) + prefill_work(4, 16)
