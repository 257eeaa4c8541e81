"""`kvrelay keys`: add, list and revoke API keys in a file that routers read."""

from __future__ import annotations

import json
import re
import secrets
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from router.access.keys import ApiKey

app = typer.Typer(help="API keys: who may use the cluster.", no_args_is_help=True)

FileOption = Annotated[
    Path,
    typer.Option(
        "--file",
        metavar="FILE",
        envvar="KVRELAY_KEY_FILE",
        show_envvar=True,
        help="The file that router.api_keys names.",
    ),
]
FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="Output for people or for programs.")
]
ID_BYTES = 4


@app.command("add")
def add(
    file: FileOption,
    tenant: Annotated[
        str,
        typer.Option(metavar="NAME", help="Whose key it is. Tenants share no cached KV."),
    ],
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A tier that it may use; may be repeated. The first is that of requests that name "
            "none. Default: all tiers.",
        ),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of prompts and answers together.")
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests that run at once.")
    ] = None,
    format_: FormatOption = "table",
) -> None:
    """Make a key and print it. It is shown this once: the file has only its hash."""
    from router.access.key_file import changing
    from router.access.keys import (
        KEY_BYTES,
        TENANT_PATTERN,
        ApiKey,
        key_digest,
        key_ids,
        key_text,
    )
    from router.access.limits import Limits

    if not re.fullmatch(TENANT_PATTERN, tenant):
        raise ConfigError(f"--tenant {tenant}: letters, digits and . _ - up to 64 of them")
    limits = Limits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
    )
    text = key_text(secrets.token_bytes(KEY_BYTES))
    with changing(file) as keys:
        key = ApiKey(
            id=_new_id(key_ids(keys)),
            digest=key_digest(text),
            tenant=tenant,
            tiers=tuple(dict.fromkeys(tier or ())),
            limits=limits,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        keys.append(key)
    if format_ == "json":
        print(json.dumps(_facts(key) | {"key": text}, indent=2))
        return
    print(f"key {key.id} of tenant {tenant}, shown this once:", file=sys.stderr, flush=True)
    print(text)


@app.command("list")
def list_keys(file: FileOption, format_: FormatOption = "table") -> None:
    """Show the keys of a file, without the keys themselves."""
    from router.access.key_file import KeyFile

    facts = [_facts(key) for key in KeyFile(file).read()]
    if format_ == "json":
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "tenant", "tiers", "requests/min", "tokens/min", "at once", "created")
    table.box = None
    for key in facts:
        table.add_row(*(_shown(value) for value in key.values()))
    Console(soft_wrap=True, width=200, highlight=False, markup=False).print(table)


@app.command("revoke")
def revoke(
    file: FileOption,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As kvrelay keys list shows.")],
) -> None:
    """Remove keys. Routers refuse them a second later; what runs already ends by itself."""
    from router.access.key_file import changing
    from router.access.keys import key_ids

    if not file.exists():
        raise ConfigError(f"{file}: there is no such file")
    with changing(file) as keys:
        unknown = {*ids} - {*key_ids(keys)}
        if unknown:
            raise ConfigError(
                f"{file} has no key {', '.join(sorted(unknown))}: nothing was changed"
            )
        keys[:] = [key for key in keys if key.id not in ids]
    print(f"revoked {', '.join(dict.fromkeys(ids))}")


def _new_id(taken: list[str]) -> str:
    while (chosen := secrets.token_hex(ID_BYTES)) in taken:
        pass
    return chosen


def _facts(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "tiers": [*key.tiers],
        **asdict(key.limits),
        "created": key.created,
    }


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "all"
    return "-" if value in (None, "") else str(value)
