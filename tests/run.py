"""`make test` and `make test-long`: all tests, then those that deserve a second run.

A test that starts processes can fail because the machine is starved. It is run once more, alone,
when all others have ended. The last lines name every test that needed it, and the log of its first
failure stays in `build/`. A pure test gets no second run.
"""

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_LONG = "not gpu and not long and not families and not clients"
SOME_FAILED = 1
SOURCES = ("proto", "kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster")
MOST_SECOND_RUNS = 20
"""With more failures than that it is not the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of pytest. `failed`: # test |-> whether it starts processes"""

    code: int
    failed: dict[str, bool]
    last_line: str


def run_pytest(options: Sequence[str], log: Path) -> Run:
    """Prints what pytest prints, and keeps it in `log`."""
    failures = log.with_suffix(".json")
    failures.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.second_chance"]
    line = last = ""
    with (
        log.open("w") as kept,
        subprocess.Popen(
            [*command, f"--failures={failures}", *options],
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
    failed = json.loads(failures.read_text()) if failures.exists() else {}
    failures.unlink(missing_ok=True)
    return Run(code=process.returncode, failed=failed, last_line=last)


def compile_sources() -> None:
    """Once: where Python must not keep what it compiles, each process would do it again, which
    takes half a second."""
    for folder in SOURCES:
        compileall.compile_dir(ROOT / folder, quiet=1)


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
        lines.append(f"the log of the first failures is {log}")
    return [*lines, f"{name}: {first.last_line}"]


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
    first = run_pytest(["-m", marks, *options], log)
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
