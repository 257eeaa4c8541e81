"""Settings of routers and workers from the `qos` section of a cluster file. Pure."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.qos import Qos, TierSection
from cluster.core.settings import WorkerSettings
from decode_worker.running_set import TierShares
from engine.core.prompt_order import Order
from engine.core.step_times import StepTimes
from kvrelay.qos import ONE_TIER, LadderRules, QosTier, QosTiers
from kvrelay.types import Objectives
from prefill_worker.job import PrefillJob
from router.text.request_fields import TierMatch


def qos_tiers(qos: Qos) -> QosTiers:
    if not qos.tiers:
        return ONE_TIER
    (default,) = (name for name, tier in qos.tiers.items() if tier.default)
    tiers = tuple(_tier(name, tier) for name, tier in qos.tiers.items())
    return QosTiers(tiers=tiers, default=default)


def router_tiers(qos: Qos, admission: str) -> QosTiers:
    """The tiers with the keys that only a router needs; `admission` names its policy."""
    ladder = qos.ladder
    if not (admission != "none" if ladder.enabled is None else ladder.enabled):
        return replace(qos_tiers(qos), ladder=None)
    rules = LadderRules(
        window_s=ladder.window,
        hold_s=ladder.hold,
        calm_s=ladder.calm,
        stricter=ladder.stricter,
        missed=ladder.missed,
        tail=ladder.tail,
    )
    return replace(qos_tiers(qos), ladder=rules)


def _tier(name: str, tier: TierSection) -> QosTier:
    return QosTier(
        name=name,
        priority=tier.priority,
        share=tier.share,
        objectives=Objectives(ttft_s=tier.ttft, tpot_s=tier.tpot),
        capped_tokens=tier.degrade.max_tokens,
        patience_s=tier.degrade.defer or 0.0,
    )


def tier_match(qos: Qos) -> TierMatch:
    """A tier's own name always means that tier."""
    return TierMatch(
        header=qos.header,
        values={value: name for name, tier in qos.tiers.items() for value in (name, *tier.match)},
    )


def tier_shares(settings: WorkerSettings) -> TierShares:
    return TierShares(slots=settings.max_running_requests, qos=settings.qos)


def prefill_order(settings: WorkerSettings, times: StepTimes) -> Order[PrefillJob]:
    weights = dict(settings.tenant_weights)
    return Order(qos=settings.qos, tenant_weights=weights, times=times)
