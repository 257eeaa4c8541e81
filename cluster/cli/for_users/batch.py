"""`kvrelay batch`: a file of requests becomes a file of answers, in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.for_users.formats import Format, FormatOption
from cluster.cli.for_users.server import (
    DEFAULT_ADDRESS,
    AddressOption,
    ApiKeyOption,
    CaFileOption,
    CertOption,
    server_at,
)
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from cluster.cli.for_users.batch_files import Output
    from cluster.cli.for_users.batch_lines import Line
    from cluster.cli.for_users.batch_run import BatchRun, Tally

DEFAULT_CONCURRENCY = 64
EXIT_NOT_ALL = 1


def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="IN.JSONL",
            exists=True,
            dir_okay=False,
            help="Requests, one a line: custom_id, method, url, body.",
        ),
    ],
    answers: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.JSONL",
            dir_okay=False,
            help="Answers, in the order in which they come. Lines answered there are not sent.",
        ),
    ],
    address: AddressOption = DEFAULT_ADDRESS,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1, help="Requests at once, at most: refusals make it less, answers more again."
        ),
    ] = DEFAULT_CONCURRENCY,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, help="Give up when the server was gone for so long."
        ),
    ] = 600.0,
    api_key: ApiKeyOption = None,
    ca_file: CaFileOption = None,
    cert: CertOption = None,
    format_: FormatOption = Format.TABLE,
) -> int:
    """Send a file of requests and write a file of answers, in OpenAI's batch format.

    Run it again after an interruption: it goes on behind the lines that are answered. The exit code
    is 0 if every line has an answer with status 200, else 1; 2 if the run could not be finished.
    """
    from cluster.cli.for_users.batch_files import count_lines, opened
    from cluster.cli.for_users.batch_run import BatchRun, Told
    from cluster.cli.for_users.window import Window

    server = server_at(address, api_key, ca_file, cert)
    if answers.exists() and answers.samefile(requests):
        raise ConfigError(f"{answers}: name another file for the answers")
    began_s = time.monotonic()
    total = count_lines(requests)
    with opened(answers) as output, _progress(total) as progress:
        before = len(output.done.answered)
        told = Told(on_change=progress.shown(before))
        run = BatchRun(server, output, Window(most=concurrency), told, patience_s=patience)
        try:
            asyncio.run(run.run(_to_send(requests, output)))
        except KeyboardInterrupt:
            print("kvrelay: stopped: run it again, and it goes on", file=sys.stderr)
            raise
    summary = _summary(total, output, run, time.monotonic() - began_s)
    _print(summary, run.tally, format_)
    return 0 if summary["answered"] == total else EXIT_NOT_ALL


def _to_send(path: Path, output: Output) -> Iterator[Line]:
    """The lines that no earlier run has answered. Two lines with one custom_id are found also
    where the first was answered before."""
    from cluster.cli.for_users.batch_lines import CustomIds, line_of, lines_of

    custom_ids, number = CustomIds(), 0
    with path.open("rb") as file:
        for number, answer_id, text in lines_of(file):
            line = custom_ids.checked(line_of(number, answer_id, text))
            if not output.done.has(number, answer_id):
                yield line
    if (last := max(output.done.answered, default=0)) > number:
        raise ConfigError(
            f"line {last} is answered, but {path} ends before: are these its answers?"
        )


def _summary(total: int, output: Output, run: BatchRun, seconds: float) -> dict[str, object]:
    """Of the whole file, but for what only this run knows: refusals, tokens and seconds."""
    tally = run.tally
    before = output.done
    return {
        "lines": total,
        "answered": before.good + tally.answered,
        "failed": len(before.answered) - before.good + tally.failed + tally.bad,
        "answered_before": len(before.answered),
        "bad_lines": tally.bad,
        "refusals": tally.refusals,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "seconds": round(seconds, 3),
    }


def _print(summary: dict[str, object], tally: Tally, format_: Format) -> None:
    for problem in tally.problems:
        print(f"kvrelay: {problem}", file=sys.stderr)
    more = tally.failed + tally.bad - len(tally.problems)
    if more:
        print(f"kvrelay: {more} more lines without a good answer", file=sys.stderr)
    if format_ is Format.JSON:
        print(json.dumps(summary, indent=2))
        return
    print(
        f"{summary['answered']} of {summary['lines']} lines answered, {summary['failed']} failed, "
        f"{summary['answered_before']} of them in earlier runs; {tally.refusals} refusals; "
        f"{tally.completion_tokens} tokens in {summary['seconds']:.1f} s"
    )


class _Bar:
    """The progress bar; a terminal alone has one."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("batch", total=total, note="")

    def shown(self, before: int) -> Callable[[Tally, int], None]:
        def on_change(tally: Tally, waiting: int) -> None:
            done = before + tally.answered + tally.failed + tally.bad
            failed = tally.failed + tally.bad
            notes = [f"{failed} failed"] if failed else []
            notes += [f"{waiting} wait for the time they were promised"] if waiting else []
            self._progress.update(self._task, completed=done, note=", ".join(notes))

        return on_change


@contextlib.contextmanager
def _progress(total: int) -> Iterator[_Bar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bar(progress, total)
