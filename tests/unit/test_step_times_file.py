"""A file of step times is used, or refused with the key that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.worker.build_engine import read_step_times
from engine.core.step_times import decode_work
from kvrelay.errors import ConfigError

TEXT = """
prefill_overhead_s: 0.003
prefill_token_s: 4.0e-5
prefill_pair_s: 1.0e-7
decode_knots: [[1, 0.004], [64, 0.01]]
decode_kv_token_s: 0
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "times.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    times = read_step_times(written(tmp_path, TEXT), most_sequences=64)
    assert times.step_s(decode_work(64, 100)) == 0.01
    assert times.prefill_pair_s == 1e-7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prefill_token_s", "prefil_token_s", "prefil_token_s: unknown key, did you mean prefill"),
        ("4.0e-5", "-4.0e-5", "prefill_token_s: got -4e-05, expected greater than or equal to 0"),
        ("4.0e-5", "fast", 'prefill_token_s: got "fast", expected a valid number'),
        ("4.0e-5", ".nan", "prefill_token_s: got"),
        ("[1,", "[0,", "decode_knots.0.0: got 0, expected greater than or equal to 1"),
        ("0.004]", "0]", "decode_knots.0.1: got 0, expected greater than 0"),
        ("[1,", "[64,", "decode_knots: ascending numbers of sequences"),
        ("decode_kv_token_s: 0", "", "decode_kv_token_s: missing, it is required"),
        ("[64,", "[63,", "decode_knots: up to 63 sequences, expected at least"),
        ("prefill_overhead_s: 0.003", "- 1", "line 3: not valid YAML"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=f"times.yaml.*{message}"):
        read_step_times(path, most_sequences=64)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read it"):
        read_step_times(tmp_path / "none.yaml", most_sequences=1)
