"""The `network` section of a cluster file: addresses, the cluster's secrets, TLS. Pure."""

from __future__ import annotations

from pydantic import field_validator, model_validator

from cluster.config.types import AutoText, Port, Section


class PublicTls(Section):
    """What clients see. Files are PEM, and read again when they change."""

    certificate: str
    """The certificate and those above it."""
    key: str
    """The certificate's private key."""
    client_ca: str | None = None
    """Authorities: only clients with a certificate from them are served. null: clients need
    none."""


class InternalTls(Section):
    """What the cluster's processes show each other. Files are PEM."""

    ca: str
    """The authorities by which they check each other's certificates."""
    certificate: str | None = None
    """The certificate and those above it. Each process has one; commands that only call a router
    need none without client_ca."""
    key: str | None = None
    """The certificate's private key."""
    client_ca: str | None = None
    """Authorities: only callers with a certificate from them are heard. null: the token is
    enough."""
    server_name: str | None = None
    """A name that is in each of the certificates, and is checked instead of the address. null: each
    has the address of its process."""

    @model_validator(mode="after")
    def _goes_together(self) -> InternalTls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key together")
        return self


class TlsSection(Section):
    """Certificates. KV links are authenticated by the token, and never encrypted."""

    public: PublicTls | None = None
    """Of the routers' HTTP and gRPC ports for clients. null: no TLS."""
    internal: InternalTls | None = None
    """Of the routers' internal ports, and the gRPC ports of workers and pool nodes. null: no
    TLS."""


class NetworkSection(Section):
    host: AutoText = None
    """Address of workers and pool nodes; auto: loopback on a Ray that kvrelay started, else the
    node's address."""
    port_range: tuple[Port, Port] | None = None
    """First and last port that workers and pool nodes may use; null: the system chooses."""
    token_file: str | None = None
    """The file of the cluster's token: 64 hex digits, mode 0600. Every internal call and every KV
    link between hosts needs it. null: NAME.token in ~/.config/kvrelay, made if it isn't there."""
    key_file: str | None = None
    """The file of the cluster's key, in the same form: routers sign with it what clients carry.
    null: NAME.key in ~/.config/kvrelay, made if it isn't there."""
    tls: TlsSection = TlsSection()

    @field_validator("port_range")
    @classmethod
    def _ascending(cls, given: tuple[int, int] | None) -> tuple[int, int] | None:
        if given is not None and not 1024 <= given[0] <= given[1]:
            raise ValueError("[first, last] with 1024 <= first <= last")
        return given
