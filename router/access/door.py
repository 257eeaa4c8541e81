"""The door of one router: from the key that a call brings to its caller.

Lives in the router's event loop. The file of keys is looked at once a second; a key that was
revoked opens nothing from then on. What runs already goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvrelay.errors import ConfigError, NotAuthenticated
from kvrelay.qos import ONE_TIER, QosTiers
from router.access.caller import ANYBODY, NO_KEYS, Caller, KeySources, cache_space
from router.access.key_file import KeyFile
from router.access.keys import (
    ApiKey,
    key_digest,
    keys_of_digests,
    presented_key,
)
from router.access.limits import Meter

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class Door:
    """Raises ConfigError for a file that can't be read."""

    def __init__(
        self,
        sources: KeySources = NO_KEYS,
        *,
        cluster_key: bytes = b"",
        tiers: QosTiers = ONE_TIER,
    ) -> None:
        self.guarded = sources.guarded
        self._cluster_key = cluster_key
        self._tiers = tiers
        self._given = keys_of_digests(sources.digests)
        self._file = KeyFile(Path(sources.file)) if sources.file is not None else None
        self._meters: dict[str, Meter] = {}  # digest of a key |-> its meter
        self._callers: dict[str, Caller] = {}  # digest |-> who brings this key
        self._use(self._file.read() if self._file is not None else ())

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Names of headers are in lower case. Raises NotAuthenticated."""
        if not self.guarded:
            return ANYBODY
        key = presented_key(headers)
        caller = self._callers.get(key_digest(key)) if key else None
        if caller is None:
            raise NotAuthenticated(_WRONG if key else _MISSING)
        return caller

    async def watch(self) -> None:
        """Follows the file, for ever."""
        while self._file is not None:
            await asyncio.sleep(PERIOD_S)
            try:
                keys = await asyncio.to_thread(self._file.read_if_changed)
                if keys is not None:
                    self._use(keys)
                    log.info("API keys were read again: %d are valid", len(self._callers))
            except ConfigError as error:
                log.error("API keys stay as they were: %s", error)

    def _use(self, listed: Iterable[ApiKey]) -> None:
        """These keys are valid, and no others. Raises ConfigError, and changes nothing, where one
        names a tier that is not there."""
        keys = (*self._given, *listed)
        for key in keys:
            for tier in key.tiers:
                if tier not in self._tiers:
                    known = ", ".join(one.name for one in self._tiers.tiers)
                    raise ConfigError(f"API key {key.id}: tier {tier} is none of {known}")
        meters = {key.digest: self._meter(key) for key in keys}
        self._callers = {key.digest: self._caller(key, meters[key.digest]) for key in keys}
        self._meters = meters

    def _meter(self, key: ApiKey) -> Meter:
        """What a key has used stays used when its limits change."""
        meter = self._meters.get(key.digest)
        if meter is None:
            return Meter(key.limits)
        if meter.limits != key.limits:
            meter.change(key.limits, time.monotonic())
        return meter

    def _caller(self, key: ApiKey, meter: Meter) -> Caller:
        return Caller(
            tenant=key.tenant,
            key_id=key.id,
            own_space=cache_space(self._cluster_key, key.tenant, ""),
            tiers=key.tiers,
            meter=meter,
            cluster_key=self._cluster_key,
        )


_MISSING = (
    "no API key: send one as the header Authorization: Bearer KEY, or x-api-key; over gRPC as the "
    "metadata authorization"
)
_WRONG = "this API key is not known, or was revoked: ask the cluster's operator for another"

OPEN_DOOR = Door()
"""Lets everybody in."""
