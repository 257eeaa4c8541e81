"""Values that clients carry from one router to another, signed with the cluster's key. Pure.

The signature is an HMAC-SHA256. Who doesn't know the key can't make one; where there is none,
anybody can.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar, get_type_hints

from kvpool.core.layout.hashes import token_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Signed = TypeVar("Signed", bound="DataclassInstance")
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class ClusterKey:
    secret: bytes = field(default=b"", repr=False)

    def sign(self, value: DataclassInstance) -> bytes:
        """Its fields are text, numbers and truth values."""
        told = json.dumps(asdict(value), separators=(",", ":")).encode()
        return self._mac(type(value), told) + told

    def open(self, kind: type[Signed], signed: bytes) -> Signed | None:
        """None: no router has made it. Without a key anybody can sign, so it may be anything."""
        mac, told = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(kind, told)):
            return None
        try:
            value = kind(**json.loads(told))
        except (TypeError, ValueError, RecursionError):
            return None
        types = get_type_hints(kind)
        return value if all(isinstance(v, types[k]) for k, v in asdict(value).items()) else None

    def _mac(self, kind: type, told: bytes) -> bytes:
        return hmac.digest(self.secret, f"kvrelay {kind.__name__} ".encode() + told, "sha256")


UNSIGNED = ClusterKey()
"""Where there is no key."""


def digest_of(prompt_ids: Sequence[int], *more: object) -> str:
    return blake2b(token_bytes(prompt_ids) + repr(more).encode(), digest_size=16).hexdigest()
