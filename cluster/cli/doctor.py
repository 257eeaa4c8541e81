"""`kvrelay doctor`: which links this host can use, and which ones a cluster file would get."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from cluster.cli.options import Format, FormatOption, Served, SetOption, given, parsed, served

if TYPE_CHECKING:
    from cluster.process.doctor import Diagnosis


EXIT_PROBLEM = 1


def doctor(
    source: Served = None,
    format_: FormatOption = Format.TABLE,
    set_: SetOption = None,
) -> None:
    """Try every transport on this host, and say what a cluster file would use.

    Exits with 1 when the cluster can't run here.
    """
    from cluster.config.load import load_config
    from cluster.process.doctor import examine

    config, model = served(source)
    found = examine(load_config(config, given(model__path=model) + parsed(set_)))
    if format_ is Format.JSON:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(EXIT_PROBLEM)


def _print(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    for finding in found.findings:
        verdict = f"usable ({finding.kind})" if finding.usable else f"not usable: {finding.why}"
        console.print(f"[bold]{finding.transport}[/bold]  {escape(verdict)}")
        for name, text in ({"needs": finding.needs} | finding.facts).items():
            console.print(f"    {name}: {text}", markup=False)
    table = Table("from", "to", "on one host", "between hosts", box=None)
    for choice in found.choices:
        ends = (choice.prefill, choice.decode)
        table.add_row(*ends, choice.same_host or "nothing", choice.between_hosts or "nothing")
    if found.choices:
        console.print(table)
    console.print(f"KV pool of this host: {found.pool}", markup=False)
    console.print(f"snapshots by CRIU: {found.snapshots}", markup=False)
    for problem in found.problems:
        console.print(f"problem: {problem}", markup=False)
    if not found.problems:
        console.print("this cluster can run here")
