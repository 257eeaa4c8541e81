"""`make test` and `make test-long`: all tests, then those that deserve a second run.

A test that starts processes can fail because the machine is starved. It is run once more, alone,
when all others have ended. The last lines name every test that needed it, and the log of its first
failure stays in `build/`. A pure test gets no second run.

Where a run of pytest itself breaks, another goes on with the tests that had not ended, and the last
lines say what broke.
"""

from __future__ import annotations

import argparse
import compileall
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_LONG = "not gpu and not long and not families and not clients"
PASSED, SOME_FAILED, BROKEN, NO_TESTS = 0, 1, 3, 5
"""What pytest's exit status means."""
SOURCES = ("proto", "kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster")
ERROR = re.compile(r"[\w.]+(Error|Exception|Warning|Failed|Exit|Interrupt)\b(?!\()")
MOST_SECOND_RUNS = 20
"""With more failures than that it is not the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`failed`: # test |-> whether it starts processes"""

    code: int
    failed: dict[str, bool]
    last_lines: list[str]
    """One for each run of pytest."""
    broken: list[str]
    """Why a run of pytest broke, in its words."""


def run_pytest(options: Sequence[str], log: Path) -> Run:
    """Prints what pytest prints, and keeps it in `log`."""
    told = log.with_suffix(".json")
    told.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.second_chance"]
    line = last = ""
    with (
        log.open("w") as kept,
        subprocess.Popen(
            [*command, f"--failures={told}", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
            last = line.strip() or last
    found = json.loads(told.read_text()) if told.exists() else {}
    return Run(
        code=process.returncode,
        failed=found.get("failed", {}),
        last_lines=[last],
        broken=found.get("broken", []),
    )


def compile_sources() -> None:
    """Once: where Python must not keep what it compiles, each process would do it again, which
    takes half a second."""
    for folder in SOURCES:
        compileall.compile_dir(ROOT / folder, quiet=1)


def run_all(options: Sequence[str], log: Path) -> Run:
    """Goes on once where pytest broke."""
    first = run_pytest(options, log)
    if not first.broken:
        return first
    print("\npytest broke: on with the tests that had not ended\n", flush=True)
    known = log.with_suffix(".json")
    rest = run_pytest([*options, f"--leave-out={known}"], _rest_of(log))
    failed = first.failed | rest.failed
    went_well = rest.code in (PASSED, SOME_FAILED, NO_TESTS) and not rest.broken
    return Run(
        code=(SOME_FAILED if failed else PASSED) if went_well else rest.code or BROKEN,
        failed=failed,
        last_lines=[*first.last_lines, *rest.last_lines],
        broken=[*first.broken, *rest.broken],
    )


def _rest_of(log: Path) -> Path:
    return log.with_name(f"{log.stem}-rest.log")


def second_chances(first: Run) -> list[str]:
    """The tests to run again; none where a second run could not make the whole a success."""
    again = [test for test, starts_processes in first.failed.items() if starts_processes]
    hopeless = first.code != SOME_FAILED or len(again) > MOST_SECOND_RUNS
    return [] if hopeless else again


def told(name: str, first: Run, again: list[str], second: Run | None, log: Path) -> list[str]:
    """The last lines of all: what needed a second run, what failed, the sum."""
    still = {} if second is None else second.failed
    failed = [test for test in first.failed if test not in again or test in still]
    lines = [f"needed a second run: {test}" for test in again if test not in still]
    lines += [f"failed: {test}" for test in failed]
    if first.failed:
        more = f" and {_rest_of(log)}" if len(first.last_lines) > 1 else ""
        lines.append(f"the log of the first failures is {log}{more}")
    lines += reasons(first.broken)
    return [*lines, f"{name}: {', then '.join(first.last_lines)}"]


def reasons(broken: list[str]) -> list[str]:
    """Each error, behind the line of code that raised it."""
    said = [line.removeprefix("E ").strip() for line in broken]
    errors = [place for place, line in enumerate(said) if ERROR.match(line)]
    return [f"pytest broke: {line}" for at in errors for line in said[max(0, at - 2) : at + 1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="the long suites instead")
    parser.add_argument("--build", type=Path, default=Path("build"), help="where logs go")
    chosen, options = parser.parse_known_args()
    chosen.build.mkdir(parents=True, exist_ok=True)
    name = "test-long" if chosen.long else "test"
    marks = "long and not gpu and not clients" if chosen.long else NOT_LONG
    log = chosen.build / f"{name}.log"
    compile_sources()
    first = run_all(["-m", marks, *options], log)
    again, second = second_chances(first), None
    if again:
        print(f"\n{len(again)} tests that start processes once more, alone\n", flush=True)
        second = run_pytest([*again, "--numprocesses=0"], chosen.build / f"{name}-again.log")
    print("\n".join(["", *told(name, first, again, second, log)]))
    if second is None or len(again) < len(first.failed):
        return first.code
    return second.code


if __name__ == "__main__":
    sys.exit(main())
