"""What a process shows to others, and what it demands of them. Pure.

The token says that a process, or a person, belongs to the cluster. Whoever has it may register
workers, read prompts and abort requests; so it never stands in a log or in an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOKEN_BYTES = 32
AUTHORIZATION = "authorization"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a server. With `client_ca` it takes only clients whose certificate is from
    there."""

    certificate: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a client checks a server: PEM files. Without `ca` by the authorities that gRPC knows.
    `certificate` and `key` are shown to servers that ask for them. `server_name`: the name that
    the server's certificate must have, where that isn't the address."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`token`: what callers must show, and what this process shows. An empty one lets nobody in.
    `serves`: TLS of what it listens on; `dials`: TLS of what it calls; None: in clear."""

    token: bytes = field(default=b"", repr=False)
    serves: TlsFiles | None = None
    dials: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Goes with each gRPC call."""
        return ((AUTHORIZATION, bearer(self.token)),) if self.token else ()


NO_ACCESS = Access()


def bearer(token: bytes) -> str:
    """The value of the header `authorization`."""
    return f"Bearer {token.hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Of one cluster. `token` is for its processes and those who run it; `key` signs what clients
    carry from router to router, and lasts longer."""

    token: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)


NO_SECRETS = Secrets()
