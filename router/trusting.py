"""Whether the two workers of a request are to be trusted with others. Pure."""

from __future__ import annotations

from kvrelay.messages import Lifetime, RequestFailed
from router.events import PairQuarantined, PairTrusted
from router.quarantine import SUSPICIOUS, Quarantine
from router.request import Request


def suspect(
    quarantine: Quarantine, request: Request, failed: RequestFailed, now_s: float
) -> list[PairQuarantined]:
    """The link between them, where the reason tells of it."""
    pair = request.pair
    if pair is None or failed.reason not in SUSPICIOUS:
        return []
    request.avoided.add(pair)
    seconds = quarantine.failed(pair, failed.reason, now_s)
    if seconds is None:
        return []
    return [
        PairQuarantined(pair=pair, seconds=seconds, reason=failed.reason, message=failed.message)
    ]


def trust(quarantine: Quarantine, request: Request, moment: Lifetime) -> list[PairTrusted]:
    """Its KV has been handed over, or even checked."""
    if moment.name not in ("handoff_committed", "kv_checked"):
        return []
    pair = request.pair
    if pair is None:
        return []
    checked = moment.name == "kv_checked"
    if not quarantine.succeeded(pair, begun_s=request.placed_s, checked=checked):
        return []
    return [PairTrusted(pair=pair)]
