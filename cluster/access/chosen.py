"""The token and the key of a cluster, as its file and the options of a command name them."""

from __future__ import annotations

from pathlib import Path

from cluster.access.files import key_path, read, read_or_make, token_path
from cluster.config.schema import Config
from cluster.core.plan import dialled_tls
from kvrelay.access.values import Access, Secrets
from kvrelay.errors import ConfigError

TOKEN_KEY = "network.token_file"
KEY_KEY = "network.key_file"


def secrets_of(config: Config) -> Secrets:
    """Of a cluster that starts, or of a router. Makes what isn't there. Raises ConfigError."""
    return Secrets(token=token_of(config), key=read_or_make(key_file(config), KEY_KEY))


def token_of(config: Config) -> bytes:
    """For a worker or pool node, which needs no key."""
    return read_or_make(token_file(config), TOKEN_KEY)


def caller_access(config: Config) -> Access:
    """Of a command that calls a router. Raises ConfigError where there is no token yet."""
    path = token_file(config)
    token = read(path, TOKEN_KEY)
    if token is None:
        raise ConfigError(
            f"{TOKEN_KEY}: no file {path}: give --token-file, a copy of the file of the user who "
            "started the cluster, or the cluster's --name"
        )
    return Access(token=token, dials=dialled_tls(config))


def check_token(config: Config, access: Access) -> None:
    """Raises ConfigError for the token of another cluster. Without one, nothing is said."""
    path = token_file(config)
    if read(path, TOKEN_KEY) not in (None, access.token):
        raise ConfigError(
            f"{TOKEN_KEY}: {path}: another token than that of the cluster {config.name}, whose "
            "processes would not hear each other"
        )


def token_file(config: Config) -> Path:
    given = config.network.token_file
    return Path(given) if given is not None else token_path(config.name)


def key_file(config: Config) -> Path:
    given = config.network.key_file
    return Path(given) if given is not None else key_path(config.name)
