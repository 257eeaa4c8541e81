"""All that must be seen on a CUDA device: each part with its own time limit, and a page of results
that is written as they come. It needs no Ray.

A part that fails or takes too long is noted, and the next one begins. With --rehearse all parts run
on the CPU with small sizes, so that nothing but the numbers is new on a device.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.gpu_day.parts import PARTS

_SHOWN_LINES = 120
_LAST_WORDS_S = 10.0
_TOO_LONG = "ended: too long"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-day"), help="a folder")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts together")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", default=names)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    page = args.out / "page.md"
    page.write_text(f"# A day on a device, {time.strftime('%Y-%m-%d')}\n")
    end_s = time.monotonic() + 60 * args.minutes
    for part in PARTS:
        line = part.line(rehearses=args.rehearse)
        if part.name in args.only:
            limit_s = min(part.limit_s, end_s - time.monotonic())
            added = part.environment(rehearses=args.rehearse)
            _run(part.name, line, added, args.out, page, limit_s)


def _run(
    name: str,
    line: Sequence[str],
    added: Mapping[str, str],
    folder: Path,
    page: Path,
    limit_s: float,
) -> None:
    """Into a log of its own; the end of it onto the page."""
    log, begin_s = folder / f"{name}.log", time.monotonic()
    print(f"{name}: {' '.join(line[2:])}", flush=True)
    ended = _watched(line, added, log, limit_s) if limit_s > 0 else "no time left"
    took_s = time.monotonic() - begin_s
    print(f"{name}: {ended} after {took_s:.0f} s", flush=True)
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:] if log.exists() else []
    with page.open("a") as written:
        written.write(f"\n## {name}: {ended}, {took_s:.0f} s\n\n```\n")
        written.write("\n".join(lines) + "\n```\n")


def _watched(line: Sequence[str], added: Mapping[str, str], log: Path, limit_s: float) -> str:
    """How it ended. `added` to its environment. Nothing of it is left."""
    with log.open("wb") as kept:
        process = subprocess.Popen(
            line,
            stdout=kept,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **added},
        )
        try:
            return f"exit {process.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return _TOO_LONG
        finally:
            _end(process)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Some programs then say what they have found so far."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_LAST_WORDS_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


if __name__ == "__main__":
    main()
