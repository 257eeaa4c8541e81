"""A running server as `kvrelay chat` and `kvrelay batch` see it: its address, and what it says
instead of an answer. Both use HTTP, as any client does.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.types import value

DEFAULT_ADDRESS = "127.0.0.1:8000"
CONNECT_S = 10.0
PROMISE_HEADER = "x-kvrelay-promise"

AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        envvar="KVRELAY_ADDRESS",
        help="The server's HTTP address; https://HOST:PORT where it has TLS.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="KVRELAY_API_KEY",
        show_envvar=True,
        help="The API key. Other users of the machine can't read it from the environment.",
    ),
]
CaFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Certificates (PEM) to trust instead of the system's, for https://.",
    ),
]
CertOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Your own certificate and its private key (PEM), where the server asks for one.",
    ),
]


@value
class Server:
    """`url` has no path. `ca_file`: whom to trust; None: whom the system trusts. `cert`: the own
    certificate, with its key."""

    url: str
    api_key: str | None = None
    ca_file: Path | None = None
    cert: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def trusted(self) -> ssl.SSLContext | bool:
        """Raises ConfigError when a file holds no certificates."""
        if self.url.startswith("http:"):
            return True
        option, file = "--ca-file", self.ca_file
        try:
            context = ssl.create_default_context(cafile=None if file is None else str(file))
            option, file = "--cert", self.cert
            if file is not None:
                context.load_cert_chain(file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{option} {file}: can't be used: {error}") from None
        return context


def server_at(
    address: str, api_key: str | None, ca_file: Path | None = None, cert: Path | None = None
) -> Server:
    """Raises ConfigError for what is neither HOST:PORT nor such a URL."""
    from cluster.process.net import split_address

    scheme, separator, rest = address.rpartition("://")
    if scheme not in ("", "http", "https") or (separator and not scheme):
        raise ConfigError(f"--address {address}: expected HOST:PORT or https://HOST:PORT")
    split_address(rest.rstrip("/"), "--address")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key: expected printable ASCII characters")
    url = f"{scheme or 'http'}://{rest.rstrip('/')}"
    return Server(url=url, api_key=api_key, ca_file=ca_file, cert=cert)


class ServerGone(KvrelayError):
    """Nobody answers at the address, or not to the end."""


def gone(server: Server, error: Exception) -> ServerGone:
    """What a user can do about an error of httpx."""
    import httpx

    said = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        advice = "kvrelay serve starts one, --address names another"
        if "SSL" in said or "certificate" in said:
            advice = "--ca-file names the certificates to trust, http:// leaves TLS out"
        return ServerGone(f"{server.url}: no server answers ({said}): {advice}")
    hint = ": is it https://?" if isinstance(error, httpx.RemoteProtocolError) else ""
    hint = hint if server.url.startswith("http:") else ""
    return ServerGone(f"{server.url}: the connection was lost ({said}){hint}")


@value
class Problem:
    """An answer that is an error. `retry_after_s`: when to come back, None: no use.

    `promise` is to be sent back at that time, as the header of that name."""

    status: int
    message: str
    code: str = ""
    retry_after_s: float | None = None
    promise: str = ""

    @property
    def is_refusal(self) -> bool:
        """The server could not take it now, and says when it will."""
        return self.status in (429, 503) and self.retry_after_s is not None

    @property
    def is_about_the_key(self) -> bool:
        return self.status == 401


def problem_of(status: int, headers: Mapping[str, str], body: bytes) -> Problem:
    """Also of what a proxy answers, which has no such fields."""
    told = error_in(body)
    return Problem(
        status=status,
        message=_text(told, "message") or f"HTTP {status}",
        code=_text(told, "code"),
        retry_after_s=_retry_after_s(headers),
        promise=headers.get(PROMISE_HEADER, ""),
    )


def error_in(body: bytes) -> Mapping[str, Any]:
    """The error's fields, OpenAI's; empty where there are none."""
    with suppress(ValueError):
        told = json.loads(body)
        if isinstance(told, dict) and isinstance(told.get("error"), dict):
            return dict(told["error"])
    return {}


def _text(told: Mapping[str, Any], name: str) -> str:
    found = told.get(name)
    return found if isinstance(found, str) else ""


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    if headers.get("x-should-retry") == "false":
        return None
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(ValueError):
            if name in headers:
                return max(0.0, float(headers[name]) * unit_s)
    return None
