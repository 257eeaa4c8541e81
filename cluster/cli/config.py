"""`kvrelay config`: the schema of cluster files, and the effective settings of one."""

from __future__ import annotations

import json

import typer

from cluster.cli.options import ConfigFile, SetOption, parsed

app = typer.Typer(help="Look at the cluster file.", no_args_is_help=True)


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of the cluster file, for editors and checks."""
    from cluster.config.schema import Config

    print(json.dumps(Config.model_json_schema(), indent=2))


@app.command("show")
def show(config: ConfigFile = None, set_: SetOption = None) -> None:
    """Print the cluster file as kvrelay reads it on this machine, with every default."""
    import yaml

    from cluster.config.load import load_config
    from cluster.core.resolve import resolve
    from cluster.process.site import site_with_gpus

    resolved = resolve(load_config(config, parsed(set_)), site_with_gpus())
    print(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), end="")
