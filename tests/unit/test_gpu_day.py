"""`python -m bench.gpu_day`, without a device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day.parts import PARTS, Part

ROOT = Path(__file__).parents[2]


def _day(folder: Path, *options: str) -> str:
    """The page of results."""
    command = [sys.executable, "-m", "bench.gpu_day", "--out", str(folder), *options]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    return (folder / "page.md").read_text()


REHEARSED = {
    "kernels": r"kernels, \d+\.\d+ ms on the device",
    "engine": r"prefill of 64 tokens",
    "collate": r"GB/s",
    "transfer": r"GB/s",
    "pull": r"ms",
    "mixed": r"2 x 32 decoded, 16 after 0: both at",
    "fp8": r"products of a layer, 32 tokens:",
    "fp8-kv": r"most likely tokens that are the same",
    "vllm": r"skipped: vLLM is not installed",
    "tilings": r"chunk Tiling\(.*16 alone: \d+\.\d us",
}
"""# part |-> what it finds. `handoff` and `timeline` are `transfer` with other options, and `tests`
collects those that need a device."""


@pytest.mark.processes
@pytest.mark.parametrize("parts", [["collate", "transfer", "pull"], ["kernels", "engine", "fp8"]])
def test_a_rehearsal_runs_the_parts_on_the_cpu(parts: list[str], tmp_path: Path) -> None:
    _rehearse(tmp_path, *parts)


@pytest.mark.processes
@pytest.mark.long
def test_a_rehearsal_interprets_the_kernels(tmp_path: Path) -> None:
    _rehearse(tmp_path, "mixed", "fp8-kv", "vllm", "tilings")


def _rehearse(folder: Path, *parts: str) -> None:
    page = _day(folder, "--rehearse", "--only", *parts)
    assert page.count("\n## ") == len(parts)
    for name in parts:
        assert f"\n## {name}: exit 0, " in page, page
        log = (folder / f"{name}.log").read_text()
        assert re.search(REHEARSED[name], log), log
        assert "not possible" not in log, log


def test_each_part_has_a_rehearsal() -> None:
    assert {part.name for part in PARTS} == {*REHEARSED, "tests", "handoff", "timeline"}
    assert all(part.line(rehearses=True) != part.line(rehearses=False) for part in PARTS)


@pytest.mark.processes
def test_a_part_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(name: str, command: str, limit_s: float) -> Part:
        line = ("bench_stub", command)
        return Part(name=name, command=line, limit_s=limit_s, rehearsal=line)

    (tmp_path / "bench_stub.py").write_text(
        "import sys, threading\n"
        "if sys.argv[1] == 'hangs':\n"
        "    threading.Event().wait()\n"
        "sys.exit(3 if sys.argv[1] == 'fails' else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = (part("first", "fails", 60), part("second", "hangs", 1), part("third", "ends", 60))
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--out", str(tmp_path)])
    gpu_day.main()
    page = (tmp_path / "page.md").read_text()
    ended = re.findall(r"\n## (\w+: .*), \d+ s", page)
    assert ended == ["first: exit 3", "second: ended: too long", "third: exit 0"]


STUB = """
import json

class SamplingParams:
    def __init__(self, *, max_tokens, **_):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, *, model, max_model_len, max_num_seqs, gpu_memory_utilization, **_):
        assert json.load(open(f"{model}/config.json"))["model_type"] == "llama"
        assert (max_model_len, max_num_seqs, gpu_memory_utilization) == (35, 2, 0.4)

    def generate(self, prompts, greedy, use_tqdm):
        assert all(len(one["prompt_token_ids"]) == 32 for one in prompts)
        one = type("Out", (), {"token_ids": [1] * greedy.max_tokens})
        return [type("Done", (), {"outputs": [one]}) for _ in prompts]
"""


@pytest.mark.processes
def test_vllm_is_measured_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    page = _day(tmp_path, "--rehearse", "--only", "vllm")
    assert "\n## vllm: exit 0, " in page, page
    for what in ("2 x (32 in, 3 out)", "a prompt of 32", "a single stream"):
        assert what in page


@pytest.mark.processes
def test_a_part_that_fails_or_has_no_time_is_told(tmp_path: Path) -> None:
    page = _day(tmp_path, "--only", "mixed", "fp8", "--minutes", "0.05")
    assert "\n## mixed: " in page and "mixed: exit 0" not in page
    assert "\n## fp8: " in page and "fp8: exit 0" not in page
    assert "no time left" in _day(tmp_path, "--only", "fp8", "--minutes", "0")


def test_every_part_has_a_limit_and_all_fit_half_an_hour() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert sum(part.limit_s for part in PARTS) <= 30 * 60
