"""Options that several commands share, and how they become overrides of the cluster file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.for_users.formats import Format as Format
from cluster.cli.for_users.formats import FormatOption as FormatOption
from cluster.config.overrides import Override
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config.workers import WorkerPool
    from kvrelay.access.values import Access


ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", envvar="KVRELAY_CONFIG", help="The cluster file (YAML)."),
]
Served = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|CONFIG",
        envvar="KVRELAY_CONFIG",
        help="A cluster file (.yaml or .yml), else a model: a folder or a hub id.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key, such as engine.block_size=32."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="A folder or a hub id. Default: the bundled model.")
]
Host = Annotated[
    str | None,
    typer.Option("--host", help="The address that clients connect to; 0.0.0.0: every interface."),
]
HttpPort = Annotated[
    int | None, typer.Option("--port", "--http-port", help="HTTP port. 0: the system chooses.")
]
GrpcPort = Annotated[
    int | None, typer.Option("--grpc-port", help="gRPC port. 0: the system chooses.")
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="KVRELAY_API_KEY",
        show_envvar=True,
        help="Serve only calls with this key; may be repeated. See also kvrelay keys.",
    ),
]
NameOption = Annotated[str | None, typer.Option("--name", help="The cluster's name.")]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="HOST:PORT", help="A running Ray, or auto to find one."),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="KVRELAY_TOKEN_FILE",
        help="The cluster's token. Default: NAME.token in ~/.config/kvrelay.",
    ),
]


def given(**options: object) -> list[Override]:
    """One override for each option that was given; `__` in a name stands for a dot."""
    return [
        Override(tuple(name.split("__")), value)
        for name, value in options.items()
        if value is not None
    ]


HEADER_TEXT = re.compile(r"[\x21-\x7e]+")


def key_hashes(keys: Iterable[str] | None) -> tuple[str, ...] | None:
    """`--api-key`: what the cluster file holds of such keys. Raises ConfigError for one that no
    header can carry."""
    if not keys:
        return None
    from router.access.keys import key_digest

    if not all(HEADER_TEXT.fullmatch(key) for key in keys):
        raise ConfigError("--api-key: expected printable ASCII without spaces")
    return tuple(key_digest(key) for key in keys)


def parsed(texts: Iterable[str] | None) -> list[Override]:
    return [Override.parse(text) for text in texts or ()]


def only(overrides: Iterable[Override], known: Collection[str]) -> list[Override]:
    """The overrides. Raises ConfigError for a key that the command would not use. A known section
    includes all of its keys."""
    kept, sections = list(overrides), tuple(f"{key}." for key in known)
    for override in kept:
        for key in _keys(".".join(override.path), override.value):
            if key not in known and not key.startswith(sections):
                raise ConfigError(f"--set {key}: not used here, only {', '.join(known)} are")
    return kept


def _keys(path: str, value: object) -> Iterator[str]:
    """The full keys that a value sets; one override can set a whole section."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(f"{path}.{key}", inner)
    else:
        yield path


CLUSTER_FILES = (".yaml", ".yml")


def served(given: str | None, model: str | None = None) -> tuple[Path | None, str | None]:
    """(cluster file, model) of a command's first argument and its --model. Raises ConfigError when
    both name a model, or when a file is neither."""
    if given is None or given.lower().endswith(CLUSTER_FILES):
        return (None if given is None else Path(given)), model
    if Path(given).is_file():
        raise ConfigError(
            f"{given}: expected a cluster file (.yaml or .yml), a model's folder or a hub id"
        )
    if model is not None:
        raise ConfigError(f"{given} and --model {model}: name one model")
    return None, given


def devices(path: Path | None, device: str | None) -> list[Override]:
    """`--device D` for every pool. Raises ConfigError where the cluster file names another
    device."""
    if device is None:
        return []
    pools = _pools_of(path)
    for index, pool in enumerate(pools):
        if "device" in pool.model_fields_set and pool.device != device:
            raise ConfigError(
                f"--device {device}: the cluster file says workers.{index}.device: {pool.device}"
            )
    return [Override(("workers", str(index), "device"), device) for index in range(len(pools))]


def replicas(path: Path | None, role: str, count: int | None) -> list[Override]:
    """`--prefill N`: the replicas of the only pool with this role."""
    if count is None:
        return []
    pools = _pools_of(path)
    matching = [index for index, pool in enumerate(pools) if pool.role == role]
    if len(matching) != 1:
        raise ConfigError(
            f"--{role} {count}: the cluster file has {len(matching)} {role} pools, "
            "use --set workers.INDEX.replicas=N"
        )
    return [Override(("workers", str(matching[0]), "replicas"), count)]


def _pools_of(path: Path | None) -> tuple[WorkerPool, ...]:
    from cluster.config.load import load_config

    return load_config(path).workers


CALLER_KEYS = ("network.token_file", "network.tls.internal")


def caller(
    cluster: str | None, token_file: str | None, set_: Iterable[str] | None = None
) -> Access:
    """Of a command that calls a router by its address. Raises ConfigError."""
    from cluster.access.chosen import caller_access
    from cluster.config.load import load_config

    overrides = given(name=cluster, network__token_file=token_file)
    return caller_access(load_config(None, overrides + only(parsed(set_), CALLER_KEYS)))
