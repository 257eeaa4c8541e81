"""Prompts that a worker computes before anyone asks, and keeps. Runs on the loop's thread."""

from __future__ import annotations

import logging

from kvpool.pins import Pins
from kvpool.tables import BlockTables
from kvrelay.messages import Released, ReserveRefused
from kvrelay.types import RequestKey, RequestSpec

log = logging.getLogger(__name__)


class Preloads:
    """Each is generated like a request whose tokens nobody waits for, then pinned: once, however
    many routers ask for it, and also when the one that asked first is gone."""

    def __init__(self, tables: BlockTables, longest_tokens: int) -> None:
        """`longest_tokens`: a sequence this long must still fit beside what is kept."""
        self._pins = Pins(tables, longest_tokens)
        self._running: dict[RequestKey, RequestSpec] = {}

    def __contains__(self, key: RequestKey) -> bool:
        """Whether it is on its way."""
        return key in self._running

    def begin(self, spec: RequestSpec) -> bool:
        """False: it is pinned already, or on its way."""
        if spec.key in self._running or spec in self._pins:
            return False
        self._running[spec.key] = spec
        return True

    def ended(self, event: Released | ReserveRefused, now_s: float) -> None:
        spec = self._running.pop(event.key, None)
        if spec is None:
            return
        if isinstance(event, Released) and self._pins.try_pin(spec, now_s):
            log.info("preloaded %d tokens", len(spec.prompt_ids))
        else:
            log.warning("no room to preload a prompt of %d tokens", len(spec.prompt_ids))
