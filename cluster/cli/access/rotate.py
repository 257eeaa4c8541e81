"""`kvrelay rotate-key`: another cluster key, in place of the one that routers sign with."""

from __future__ import annotations

from typing import Annotated

import typer

COSTS = """A new key for the cluster {name}, in {path}:
- cached KV of tenants with API keys is not found any more, and is computed again;
- tickets of open streams are void: a stream whose router dies begins anew, if its client asks;
- promises to refused requests are void.
It counts from the next start of the cluster on. Give all hosts with routers the new file.
The token stays as it is: delete its file to get another one, then start every process again."""


def rotate_key(
    name: Annotated[str | None, typer.Option(help="The cluster's name.")] = None,
    key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The key. Default: NAME.key in ~/.config/kvrelay."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Replace the cluster's key, after telling what that costs."""
    from cluster.access import chosen, files
    from cluster.config.load import load_config
    from cluster.config.overrides import Override

    given = {("name",): name, ("network", "key_file"): key_file}
    chosen_here = [Override(path, value) for path, value in given.items() if value is not None]
    config = load_config(None, chosen_here)
    path = chosen.key_file(config)
    print(COSTS.format(name=config.name, path=path))
    if not yes:
        typer.confirm("Replace it?", abort=True)
    files.replace(path, chosen.KEY_KEY)
    print("replaced")
