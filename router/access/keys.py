"""API keys: what a router knows of each, and how one is recognised. Pure.

Only the SHA-256 of a key is kept. A slow hash protects what people choose, because it can be
guessed; a key that kvrelay makes has 256 random bits, which nobody can try out. So a fast hash is
as safe, and a call pays for one of it, not for 0.1 s.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvrelay.errors import ConfigError
from kvrelay.types import value
from router.access.caller import DEFAULT_TENANT
from router.access.limits import UNLIMITED, Limits

KEY_BYTES = 32
TENANT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


@value
class ApiKey:
    """`tiers`: those that it may use, the one of requests that name none first; empty: all.
    `digest`: SHA-256 of the key, in hex."""

    id: str
    digest: str
    tenant: str
    tiers: tuple[str, ...] = ()
    limits: Limits = UNLIMITED
    created: str = ""


def key_text(random: bytes) -> str:
    """The key itself, as its owner gets it. `random`: KEY_BYTES of them."""
    return f"kvr-{urlsafe_b64encode(random).decode().rstrip('=')}"


def key_digest(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def keys_of_digests(digests: Iterable[str]) -> tuple[ApiKey, ...]:
    """Keys of the default tenant, without limits."""
    return tuple(ApiKey(id=one[:8], digest=one, tenant=DEFAULT_TENANT) for one in digests)


def presented_key(headers: Mapping[str, str]) -> str:
    """The key that a call brings: a bearer token, or x-api-key as Anthropic's clients send it.
    Empty: none. Names of headers are in lower case."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "").strip()


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Tenant = Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]
_Limit = Annotated[int, Field(ge=1)] | None


class KeyEntry(BaseModel):
    """One key, as it stands in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1, max_length=64)]
    sha256: _Digest
    tenant: _Tenant
    tiers: list[str] = []
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    concurrent_requests: _Limit = None
    created: str = ""

    def key(self) -> ApiKey:
        limits = Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
        )
        return ApiKey(
            id=self.id,
            digest=self.sha256,
            tenant=self.tenant,
            tiers=tuple(self.tiers),
            limits=limits,
            created=self.created,
        )

    @classmethod
    def of(cls, key: ApiKey) -> KeyEntry:
        return cls(
            id=key.id,
            sha256=key.digest,
            tenant=key.tenant,
            tiers=[*key.tiers],
            requests_per_minute=key.limits.requests_per_minute,
            tokens_per_minute=key.limits.tokens_per_minute,
            concurrent_requests=key.limits.concurrent_requests,
            created=key.created,
        )


_ENTRIES = TypeAdapter(list[KeyEntry])


def parse_keys(content: bytes, name: str) -> tuple[ApiKey, ...]:
    """The keys of a file; `name` is the file's. Raises ConfigError that names what is wrong."""
    try:
        keys = tuple(entry.key() for entry in _ENTRIES.validate_json(content or b"[]"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name}: {where + ': ' if where else ''}{first['msg']}") from None
    for one, what in ((key_ids(keys), "id"), ([key.digest for key in keys], "sha256")):
        if len({*one}) < len(one):
            raise ConfigError(f"{name}: {what}: each key once")
    return keys


def key_ids(keys: Iterable[ApiKey]) -> list[str]:
    return [key.id for key in keys]


def dump_keys(keys: Iterable[ApiKey]) -> bytes:
    """The content of a file; defaults are left out."""
    entries = [KeyEntry.of(key) for key in keys]
    return _ENTRIES.dump_json(entries, indent=2, exclude_defaults=True) + b"\n"
