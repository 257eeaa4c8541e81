"""`kvrelay status` of one Ray, asked as often as a test likes.

It runs the command itself, but always in one process (`python -m tests.integration.ray_questions`).
A process for each question would import Ray and kvrelay anew, which takes seconds of the CPUs that
the cluster needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from cluster.cli.main import app
from kvrelay.errors import KvrelayError

_ROOT = Path(__file__).parents[2]


class Questions:
    """The asking side. `env`: that of the commands. Its process starts with the first question, and
    again when it has ended with its Ray."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._process: subprocess.Popen[str] | None = None

    def status(self, *options: str) -> object:
        """What `kvrelay status --format json` prints; None when it can't do its work."""
        answer = self._ask(["status", *options, "--format", "json"])
        return None if answer is None else json.loads(answer)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, command: list[str]) -> str | None:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            self.end()
            return None
        answer: str | None = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ray_questions"],
            cwd=_ROOT,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def printed(command: list[str]) -> str | None:
    """What it prints; None when it can't do its work."""
    with redirect_stdout(StringIO()) as text:
        try:
            app(command, prog_name="kvrelay", standalone_mode=False)
        except KvrelayError:
            return None
    return text.getvalue()


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Ray says is no answer
    for line in sys.stdin:
        print(json.dumps(printed(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
