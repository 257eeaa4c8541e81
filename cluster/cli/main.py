"""The `kvrelay` command: its entry point, its error messages, and `kvrelay config`.

Commands import what they need when they run, so that help is instant.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Annotated

import typer

from cluster.cli import change as cli_change
from cluster.cli import cluster as cli_cluster
from cluster.cli import doctor as cli_doctor
from cluster.cli import plan as cli_plan
from cluster.cli import process as cli_process
from cluster.cli import simulate as cli_simulate
from cluster.cli import trace as cli_trace
from cluster.cli.access import keys as cli_keys
from cluster.cli.access import rotate as cli_rotate
from cluster.cli.for_users import batch as cli_batch
from cluster.cli.for_users import chat as cli_chat
from cluster.cli.for_users import models as cli_models
from cluster.cli.options import ConfigFile, SetOption, parsed
from kvrelay.errors import KvrelayError

CLICK_ERROR = typer.BadParameter.__mro__[2]
EXIT_ERROR = 2


def print_version(asked: bool) -> None:
    if asked:
        print(f"kvrelay {metadata.version('kvrelay')}")
        raise typer.Exit


app = typer.Typer(
    name="kvrelay",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


config_app = typer.Typer(help="Look at the cluster file.", no_args_is_help=True)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=print_version, help="Show it and exit."),
    ] = False,
) -> None:
    """Serve language models with prefill and decode on separate workers."""


@config_app.command("schema")
def schema() -> None:
    """Print the JSON schema of the cluster file, for editors and checks."""
    from cluster.config.schema import Config

    print(json.dumps(Config.model_json_schema(), indent=2))


@config_app.command("show")
def show(config: ConfigFile = None, set_: SetOption = None) -> None:
    """Print the cluster file as kvrelay reads it on this machine, with every default."""
    import yaml

    from cluster.config.load import load_config
    from cluster.core.resolve import resolve
    from cluster.process.site import site_with_gpus

    resolved = resolve(load_config(config, parsed(set_)), site_with_gpus())
    print(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), end="")


app.command("serve")(cli_cluster.serve)
app.command("stop")(cli_cluster.stop)
app.command("apply")(cli_change.apply)
app.command("scale")(cli_change.scale)
app.command("drain")(cli_change.drain)
app.command("flip")(cli_change.flip)
app.command("demo")(cli_cluster.demo)
app.command("chat")(cli_chat.chat)
app.command("batch")(cli_batch.batch)
app.command("models")(cli_models.models)
app.command("status")(cli_cluster.status)
app.command("top")(cli_cluster.top)
app.command("trace")(cli_trace.trace)
app.command("doctor")(cli_doctor.doctor)
app.command("rotate-key")(cli_rotate.rotate_key)
app.command("simulate")(cli_simulate.simulate)
app.command("plan")(cli_plan.plan)
app.command("router", rich_help_panel="Single processes, without Ray")(cli_process.router)
app.command("worker", rich_help_panel="Single processes, without Ray")(cli_process.worker)
app.command("pool-node", rich_help_panel="Single processes, without Ray")(cli_process.pool_node)
app.command("controller", rich_help_panel="Single processes, without Ray")(cli_process.controller)
app.add_typer(cli_keys.app, name="keys")
app.add_typer(config_app, name="config")


def main() -> None:
    """Run one command. Exit code 0: it did its work; 2: it can't, and one line on stderr says
    why."""
    try:
        code = app(prog_name="kvrelay", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except KvrelayError as error:
        _fail(str(error))
    except Exception as error:
        if not isinstance(error, CLICK_ERROR):
            raise
        _fail(_usage(error))
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Exception) -> str:
    """The message of click, and the command that shows help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "kvrelay"
    text = error.format_message()  # type: ignore[attr-defined]
    text = text.replace("Value error, ", "").rstrip(".")
    return f"{text} (see {command} --help)" if text else f"see {command} --help"


def _fail(message: str) -> None:
    print(f"kvrelay: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(EXIT_ERROR)
