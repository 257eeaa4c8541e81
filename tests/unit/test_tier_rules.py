"""Which tier a request gets: by its own field, its API key, the header, or none of them."""

from __future__ import annotations

import pytest

from cluster.config.qos import Qos, TierSection
from cluster.core.qos import qos_tiers, tier_match
from kvrelay.errors import InvalidRequest
from router.text.request_fields import ONE_FOR_ALL, TierRules

QOS = Qos(
    tiers={
        "premium": TierSection(match=("gold", "Gold Plus"), api_keys=("k-1",)),
        "free": TierSection(default=True),
    }
)
RULES = TierRules(tiers=qos_tiers(QOS), match=tier_match(QOS))


@pytest.mark.parametrize(
    ("headers", "tier"),
    [
        ({}, "free"),
        ({"x-customer-tier": "premium"}, "premium"),
        ({"x-customer-tier": " gold "}, "premium"),
        ({"x-customer-tier": "Gold Plus"}, "premium"),
        ({"x-customer-tier": "platinum"}, "free"),
        ({"authorization": "Bearer k-1"}, "premium"),
        ({"authorization": "bearer k-1", "x-customer-tier": "free"}, "premium"),
        ({"authorization": "Bearer  k-1 "}, "premium"),
        ({"authorization": "Basic k-1"}, "free"),
        ({"authorization": "Bearer k-2"}, "free"),
        ({"authorization": "Bearer k-2", "x-customer-tier": "gold"}, "premium"),
    ],
)
def test_by_headers(headers: dict[str, str], tier: str) -> None:
    assert RULES.tier_of("", headers) == tier


def test_by_its_own_field() -> None:
    assert RULES.tier_of("premium", {"x-customer-tier": "free"}) == "premium"
    assert RULES.tier_of("premium", {"authorization": "Bearer k-1"}) == "premium"


def test_a_tier_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match="must be one of premium, free, not gold") as invalid:
        RULES.tier_of("gold", {})
    assert invalid.value.param == "tier"
    assert ONE_FOR_ALL.tier_of("default", {}) == "default"
    with pytest.raises(InvalidRequest, match="one of default, not premium"):
        ONE_FOR_ALL.tier_of("premium", {})


def test_a_field_that_its_api_key_denies_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tier is free, but this API key is of tier premium"):
        RULES.tier_of("free", {"authorization": "Bearer k-1"})


def test_another_header() -> None:
    qos = QOS.model_copy(update={"header": "x-plan"})
    rules = TierRules(tiers=qos_tiers(qos), match=tier_match(qos))
    assert rules.tier_of("", {"x-plan": "gold"}) == "premium"
    assert rules.tier_of("", {"x-customer-tier": "gold"}) == "free"
