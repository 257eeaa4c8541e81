"""`python -m bench.gpu_day`, without a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day.parts import PARTS, Part
from tests.unit.test_house import folder_of, imported

ROOT = Path(__file__).parents[2]


def _day(folder: Path, *options: str) -> str:
    """The page of results, where Ray can't be imported."""
    (folder / "ray.py").write_text("raise ImportError('a day on a device needs no Ray')\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "bench.gpu_day", "--out", str(folder), *options]
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        timeout=600,
        check=True,
    )
    return (folder / "page.md").read_text()


_ENGINE = (
    "decode step, 4 x 32 tokens: ",
    "decode step launched ahead, 8 x 16 tokens: ",
    "prefill of 64 tokens: ",
    "Python of a decode step, 8 x 16 tokens: ",
    "decode attention of a layer, 4 x 64 tokens: ",
    "decode attention of a layer, contexts ",
    "decode step, 4 x 32 tokens, beside prompts of 32: ",
    "paces of both beside each other, ",
    "attention of a layer by sdpa, prefill 16 after 16: ",
    "output tokens/s, 2 x ",
)
"""What rows begin with, in their order: one of each kind."""
REHEARSED = {
    "kernels": r"kernels, \d+\.\d+ ms on the device",
    "engine": "(?s)" + ".*\n".join(map(re.escape, _ENGINE)),
    "chunks": r"(?s)prompt of 64 tokens, launched behind.*device idle for each chunk",
    "backends": r"(?s)triton: decode step, 2 x 32 .*sdpa: .*2 x 32 tokens, one at a time",
    "collate": r"GB/s",
    "transfer": r"GB/s",
    "handoff": r"(?s)handoff push.*handoff pull.*handoff pool",
    "timeline": r"(?s)behind the prompt's compute.*layer groups left then, of 4",
    "pull": r"ms",
    "mixed": r"(?s)16 after 0: two launches at.*16 after 0: one launch",
    "fp8": r"products of a layer, 32 tokens:",
    "fp8-kv": r"(?s)tokens that a worker holds in .*most likely tokens that are the same",
    "vllm": r"skipped: vLLM is not installed",
    "ranks": r"(?s)decode step of 4, two ranks of a thread.*two stages .a thread each.",
    "tilings": r"chunk Tiling\(.*16 alone: \d+\.\d us",
}
"""# part |-> what it finds. `tests` only collects those that need a device."""


@pytest.mark.processes
def test_a_rehearsal_runs_the_parts_on_the_cpu(tmp_path: Path) -> None:
    _rehearse(tmp_path, "kernels", "engine", "chunks", "collate", "fp8")


@pytest.mark.processes
@pytest.mark.long
def test_a_rehearsal_interprets_the_kernels(tmp_path: Path) -> None:
    _rehearse(tmp_path, "backends", "mixed", "fp8-kv", "vllm", "tilings")


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("part", ["transfer", "handoff", "timeline", "pull", "ranks"])
def test_a_rehearsal_starts_other_processes(part: str, tmp_path: Path) -> None:
    _rehearse(tmp_path, part)


def _rehearse(folder: Path, *parts: str) -> None:
    page = _day(folder, "--rehearse", "--only", *parts)
    assert page.count("\n## ") == len(parts)
    for name in parts:
        assert f"\n## {name}: exit 0, " in page, page
        log = (folder / f"{name}.log").read_text()
        assert re.search(REHEARSED[name], log), log
        assert "not possible" not in log and "Traceback" not in log, log


def test_each_part_has_a_rehearsal() -> None:
    assert {part.name for part in PARTS} == {*REHEARSED, "tests"}
    assert all(part.line(rehearses=True) != part.line(rehearses=False) for part in PARTS)


def test_no_part_imports_ray() -> None:
    """Neither do the modules that its modules import, wherever in them. Their own processes are
    seen in the rehearsals."""
    programs = {"bench.gpu_day", *(part.command[0] for part in PARTS)} - {"pytest"}
    seen = set(_reached(programs))
    assert {"bench.transfer.timeline.profile", "engine.parallel.leader"} <= seen
    assert {name for name in seen if name.split(".")[0] == "ray"} == set()


def _reached(modules: set[str]) -> Iterator[str]:
    """All that these modules import, and those."""
    seen, left = set(modules), [*modules]
    while left:
        yield (name := left.pop())
        found = {one for path in _files(name) for one in imported(path)}
        left += found - seen
        seen |= found


def _files(module: str) -> Iterator[Path]:
    """None of what isn't ours."""
    folder = folder_of(module)
    if folder is not None:
        last = module.rsplit(".", 1)[-1]
        files = (folder / "__init__.py", folder / "__main__.py", folder / f"{last}.py")
        yield from (ROOT / one for one in files if (ROOT / one).is_file())


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
