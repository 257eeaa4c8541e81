"""Which tier a request gets: by its own field, the header, its API key, or none of them."""

from __future__ import annotations

import pytest

from cluster.config.qos import Qos, TierSection
from cluster.core.qos import qos_tiers, tier_match
from kvrelay.errors import InvalidRequest, NotAllowed
from router.text.request_fields import ONE_FOR_ALL, TierRules

QOS = Qos(
    tiers={
        "premium": TierSection(match=("gold", "Gold Plus")),
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
    ],
)
def test_by_headers(headers: dict[str, str], tier: str) -> None:
    assert RULES.tier_of("", headers) == tier


def test_by_its_own_field() -> None:
    assert RULES.tier_of("premium", {"x-customer-tier": "free"}) == "premium"


def test_a_tier_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match="must be one of premium, free, not gold") as invalid:
        RULES.tier_of("gold", {})
    assert invalid.value.param == "tier"
    assert ONE_FOR_ALL.tier_of("default", {}) == "default"
    with pytest.raises(InvalidRequest, match="one of default, not premium"):
        ONE_FOR_ALL.tier_of("premium", {})


def test_a_key_has_the_first_of_its_tiers_and_may_name_the_others() -> None:
    assert RULES.tier_of("", {}, ["premium", "free"]) == "premium"
    assert RULES.tier_of("free", {}, ["premium", "free"]) == "free"
    assert RULES.tier_of("", {"x-customer-tier": "free"}, ["premium", "free"]) == "free"
    assert RULES.tier_of("", {"x-customer-tier": "nonsense"}, ["premium"]) == "premium"
    assert RULES.tier_of("premium", {"x-customer-tier": "free"}, ["premium"]) == "premium"


def test_a_tier_that_its_key_may_not_use_is_refused_by_field_and_by_header() -> None:
    with pytest.raises(NotAllowed, match="may use the tiers free, not premium") as denied:
        RULES.tier_of("premium", {}, ["free"])
    assert (denied.value.code, denied.value.param) == ("tier_not_allowed", "tier")
    with pytest.raises(NotAllowed, match="not premium") as denied:
        RULES.tier_of("", {"x-customer-tier": "gold"}, ["free"])
    assert denied.value.param == "x-customer-tier"
    with pytest.raises(InvalidRequest, match="must be one of free, not gold"):
        RULES.tier_of("gold", {}, ["free"])


def test_another_header() -> None:
    qos = QOS.model_copy(update={"header": "x-plan"})
    rules = TierRules(tiers=qos_tiers(qos), match=tier_match(qos))
    assert rules.tier_of("", {"x-plan": "gold"}) == "premium"
    assert rules.tier_of("", {"x-customer-tier": "gold"}) == "free"
