"""The README's table of figures: each row has its command and its commit, and none is invented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.figures import __main__ as figures
from bench.figures.recorded import BEGIN, END, Recorded, read, table, with_table, write
from bench.figures.wanted import WANTED, Figure, Wanted, amount, figure

REPOSITORY = Path(__file__).parents[2]
TTFT = Wanted(
    key="ttft", what="time to first token", module="bench.x", row="TTFT p50", peer="computed"
)
ROW = {
    "name": "TTFT p50, split",
    "value": 50.4,
    "unit": "ms",
    "against": "computed",
    "against_value": 848.0,
    "ratio": 0.0594,
}


def test_the_readmes_table_is_what_is_recorded() -> None:
    page = (REPOSITORY / "README.md").read_text()
    assert with_table(page, read(REPOSITORY / "docs/figures.json")) == page, "make figures"


def test_every_row_has_its_command_and_its_commit() -> None:
    rows = read(REPOSITORY / "docs/figures.json")
    assert [(row.key, row.command) for row in rows] == [(one.key, one.command) for one in WANTED]
    for row in rows:
        assert bool(row.ours) == bool(re.fullmatch("[0-9a-f]{7,}", row.commit)), row.key


@pytest.mark.parametrize("module", sorted({one.module for one in WANTED}))
def test_commands_are_benches_that_write_json(module: str) -> None:
    path = REPOSITORY / module.replace(".", "/")
    source = path.with_suffix(".py") if not path.is_dir() else path / "__main__.py"
    assert '"--json"' in source.read_text()


def test_a_figure_is_read_off_its_row() -> None:
    assert figure(TTFT, [ROW]) == Figure(ours="50.4 ms", against="computed: 848 ms", ratio="0.0594")


def test_a_figure_may_stand_beside_another_row() -> None:
    wanted = Wanted(key="k", what="w", module="m", row="predictive", beside="none", peer="all")
    rows = [
        {"name": "predictive, oracle", "value": 9.0, "unit": "/s", "against": ""},
        {"name": "predictive", "value": 7.0, "unit": "/s", "against": "its best"},
        {"name": "none", "value": 2.0, "unit": "/s", "against": ""},
    ]
    assert figure(wanted, rows) == Figure(ours="7/s", against="all: 2/s", ratio="3.5")


@pytest.mark.parametrize(
    "rows",
    [[], [{**ROW, "name": "other"}], [{**ROW, "against_value": None, "ratio": None}]],
    ids=["nothing", "another row", "no peer"],
)
def test_what_a_bench_does_not_say_is_no_figure(rows: list[dict[str, object]]) -> None:
    assert figure(TTFT, rows) is None


def test_amounts() -> None:
    assert amount(133.9, "tokens/s") == "134 tokens/s"
    assert amount(12_345.6, "tokens/s") == "12,346 tokens/s"


def test_an_unmeasured_row_says_so() -> None:
    text = table([Recorded(key="k", what="w", against="peer", command="python -m bench.x")])
    assert text.splitlines()[-1] == ("| w | not measured yet | peer |  | `python -m bench.x` |  |")


def test_an_earlier_commit_says_so() -> None:
    row = Recorded(key="k", what="w", ours="1", command="c", commit="abcdef0", earlier=True)
    assert row.cells[-1] == "abcdef0 or earlier"


def test_a_page_needs_its_markers() -> None:
    with pytest.raises(ValueError, match="figures: begin"):
        with_table("# A page", [])


# --- the tool, on a small repository ------------------------------------------------------------

BENCH = """
import json, sys
if "--broken" in sys.argv:
    sys.exit("the peer is not installed: make bench-peers")
with open(sys.argv[-1], "w") as file:
    json.dump([dict(name="speed", value=3.0, unit="GB/s", against="memcpy", against_value=6.0,
                    ratio=0.5)], file)
"""
SMALL = (
    Wanted(key="a", what="speed", module="fake_bench", row="speed", peer="memcpy"),
    Wanted(key="b", what="peer", module="fake_bench", options=("--broken",), row="x", peer="vLLM"),
    Wanted(key="c", what="kept", module="fake_bench", row="no such row", peer="vLLM"),
)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "WANTED", SMALL)
    (tmp_path / "fake_bench.py").write_text(BENCH)
    (tmp_path / "README.md").write_text(f"# Figures\n{BEGIN}\n{END}\nafter\n")
    (tmp_path / "docs").mkdir()
    kept = Recorded(key="c", what="kept", ours="7", command="old", commit="1234567")
    write(tmp_path / "docs/figures.json", [kept])
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def run_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.figures", "--folder", str(folder), *options])
    figures.main()


def test_the_tool_measures_and_renews_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    head = git(folder, "rev-parse", "--short", "HEAD")
    run_tool(folder, monkeypatch)
    said = capfd.readouterr().out
    assert "b: not measured: the peer is not installed: make bench-peers" in said
    assert "c: not measured: the bench yields no such row" in said
    rows = {row["key"]: row for row in json.loads((folder / "docs/figures.json").read_text())}
    assert (rows["a"]["commit"], rows["c"]["commit"]) == (head, "1234567")
    assert (folder / "README.md").read_text().splitlines()[4:] == [
        f"| speed | 3 GB/s | memcpy: 6 GB/s | 0.5 | `python -m fake_bench` | {head} |",
        "| peer | not measured yet | vLLM |  | `python -m fake_bench --broken` |  |",
        "| kept | 7 |  |  | `old` | 1234567 |",
        END,
        "after",
    ]
    run_tool(folder, monkeypatch, "--only", "a")  # its own changes need no commit


def test_changed_code_has_no_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fake_bench.py").write_text(BENCH + "# changed")
    with pytest.raises(SystemExit, match=r"commit first: .* but fake_bench\.py is changed"):
        run_tool(folder, monkeypatch)
    run_tool(folder, monkeypatch, "--table")  # measures nothing
