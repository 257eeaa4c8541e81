"""Alerts name metrics, labels and reasons that exist, and a section of the documentation."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from kvrelay.errors import RefusalReason
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_docs_tuning import families

FOLDER = REPOSITORY / "deploy/kubernetes/components/prometheus-operator"
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())
ALERTS = [rule for group in RULES["spec"]["groups"] for rule in group["rules"]]
each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])


def wrong(expr: str) -> list[str]:
    """Metrics that don't exist, labels that none of the others has, and unknown reasons."""
    known = families()
    metrics = re.findall(r"kvrelay:\w+", expr)
    labels = {label for name in metrics for label in known.get(name, ())}
    grouped = re.findall(r"(?:by|on) \(([\w, ]+)\)", expr)
    asked = [label for group in grouped for label in group.split(", ")]
    asked += re.findall(r"[{,](\w+)=", expr)
    reasons = "|".join(re.findall(r'reason=~?"([\w|]+)"', expr)).split("|")
    return [
        *(name for name in metrics if name not in known),
        *(label for label in asked if label not in labels),
        *(reason for reason in reasons if reason and reason not in {*RefusalReason}),
    ]


@each_alert
def test_an_alert_names_what_exists(alert: dict[str, Any]) -> None:
    assert re.findall(r"kvrelay:\w+", alert["expr"])
    assert not wrong(alert["expr"])
    assert alert["expr"].count("(") == alert["expr"].count(")")
    (section, page) = re.findall(r'"(.+)" in (\S+\.md)', alert["annotations"]["description"])[0]
    assert f"\n## {section}\n" in (REPOSITORY / page).read_text()


def test_the_component_has_the_rules() -> None:
    parts = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert "rules.yaml" in parts["resources"]


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ("kvrelay:pool_takes > 0", ["kvrelay:pool_takes"]),
        ("sum by (pool, role) (kvrelay:pool_takes_info)", ["role"]),
        ('kvrelay:request_rejections_total{reason=~"no_capacity|late"}', ["late"]),
        ('kvrelay:request_rejections_total{cause="x"}', ["cause"]),
    ],
)
def test_what_does_not_exist_is_found(expr: str, found: list[str]) -> None:
    assert wrong(expr) == found
