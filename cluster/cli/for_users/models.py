"""`kvrelay models`: which model families are served, and why the others are not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.for_users.formats import Format, FormatOption
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from engine.support.matrix import Family, Matrix

WIDTH = 200


def models(
    family: Annotated[
        str | None,
        typer.Argument(metavar="FAMILY", help="One family: the model_type of its config.json."),
    ] = None,
    served: Annotated[bool, typer.Option("--served", help="Only those that are served.")] = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """List the model families: served with exactly transformers' tokens, or refused and why.

    A worker's own checks decide when it starts; this is what they said when each family was tried.
    """
    from engine.support.matrix import support_matrix

    matrix = support_matrix()
    shown = [one for one in matrix.families if family in (None, one.name)]
    if not shown:
        raise ConfigError(
            f"{family}: no causal family of transformers {matrix.transformers}; kvrelay models "
            "lists them"
        )
    shown = [one for one in shown if one.is_served or not served]
    if format_ is Format.JSON:
        print(json.dumps(_facts(matrix, shown), indent=2))
    else:
        _print(matrix, shown)


def _facts(matrix: Matrix, families: list[Family]) -> dict[str, object]:
    return {
        "transformers": matrix.transformers,
        "families": [
            {
                "family": one.name,
                "state": "exact" if one.is_served else "refused",
                "check": None if one.is_served else one.check,
                "why": one.why or None,
                "tool_formats": list(one.formats.tools),
                "reasoning_format": one.formats.reasoning or None,
            }
            for one in families
        ],
    }


def _print(matrix: Matrix, families: list[Family]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, width=WIDTH, highlight=False, markup=False)
    table = Table("family", "state", "tools", "reasoning", "why", box=None)
    for one in families:
        state = "exact" if one.is_served else f"refused ({one.check})"
        tools = " or ".join(one.formats.tools) or "-"
        table.add_row(one.name, state, tools, one.formats.reasoning or "-", one.why or "-")
    console.print(table)
    total = len(matrix.families)
    console.print(
        f"{matrix.served} of {total} causal families of transformers {matrix.transformers} are "
        "served; tiny random models of them gave exactly its tokens"
    )
