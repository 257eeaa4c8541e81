"""Certificates in files, of authorities that are made for a test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import trustme

from kvrelay.access.values import Tls, TlsFiles

HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    certificate: str
    key: str


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder / name
        self._folder.mkdir()
        self.ca = str(self._folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def pair(self, name: str, *hosts: str) -> Pair:
        """The files of a certificate; those of an earlier one with this name are replaced."""
        made = self._ca.issue_cert(*(hosts or HOSTS), common_name=name)
        pair = Pair(
            certificate=str(self._folder / f"{name}.pem"), key=str(self._folder / f"{name}.key")
        )
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        _replace(pair.certificate, chain)
        _replace(pair.key, made.private_key_pem.bytes())
        return pair

    def serves(self, name: str, *hosts: str, client_ca: str | None = None) -> TlsFiles:
        pair = self.pair(name, *hosts)
        return TlsFiles(certificate=pair.certificate, key=pair.key, client_ca=client_ca)

    def dials(self, name: str | None = None, server_name: str | None = None) -> Tls:
        """With a certificate of its own if it has a name."""
        if name is None:
            return Tls(ca=self.ca, server_name=server_name)
        pair = self.pair(name)
        return Tls(ca=self.ca, certificate=pair.certificate, key=pair.key, server_name=server_name)


def _replace(path: str, content: bytes) -> None:
    """A file of its own, as Kubernetes and cert-manager write it."""
    beside = Path(f"{path}.new")
    beside.write_bytes(content)
    os.replace(beside, path)
