"""JSON that is written in steps is the same JSON."""

from __future__ import annotations

import pytest

from router.http.api import STEP_VALUES, json_bytes, long_json_bytes


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [], "b": {"c": None, "é": 0.5}},
        [{"x": list(range(3 * STEP_VALUES + 1))}, "text"],
        {"choices": [{"prompt_logprobs": [None, *({"1": {"rank": i}} for i in range(2000))]}]},
        [[1] * STEP_VALUES, [2] * (STEP_VALUES + 1)],
    ],
)
def test_it_is_the_same_json(value: object) -> None:
    assert long_json_bytes(value) == json_bytes(value)
