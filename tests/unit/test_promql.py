"""Prometheus' own `promtool` evaluates the alert, and the queries that KEDA and HPAs scale by."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_alerts import RULES
from tests.unit.test_docs import REPOSITORY

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here: Debian's package prometheus has it"
)
KEDA = REPOSITORY / "deploy/kubernetes/components/keda/scaledobjects.yaml"
HPAS = KEDA.parents[1] / "hpa" / "hpas.yaml"
ALERT = "KvrelayPoolGetsNothing"
RULE = 'kvrelay:pool_takes_info{model_name="m",pool="cpu",takes="prompt_tokens > 5000"}'
BEGUN = 'kvrelay:pool_prefilled_prompts_total{model_name="m",pool="cpu",instance="%s"}'
REFUSED = (
    'kvrelay:request_rejections_total{model_name="m",reason="%s",tier="default",instance="%s"}'
)
FIRES = {"severity": "warning", "model_name": "m", "pool": "cpu"}


def series(**values: str) -> list[dict[str, str]]:
    """Of two routers. Notation of promtool: 5x30 stays, 0+1x30 grows."""
    named = {
        "rule": RULE,
        "begun": BEGUN % "a",
        "begun_elsewhere": BEGUN % "b",
        "late": REFUSED % ("ttft_unreachable", "a"),
        "late_elsewhere": REFUSED % ("deadline_unreachable", "b"),
        "full": REFUSED % ("slots_exhausted", "a"),
    }
    return [{"series": named[name], "values": text} for name, text in values.items()]


def evaluated(tmp_path: Path, test: dict[str, Any]) -> None:
    """Fails with what promtool has found instead."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES["spec"]))
    file = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", **test}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(file))
    command = [str(PROMTOOL), "test", "rules", "test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


GROWS, STAYS = "0+1x40", "5x40"
CASES: dict[str, tuple[dict[str, str], str, bool]] = {
    "refused, and nothing begun": ({"late": GROWS, "begun": STAYS}, "25m", True),
    "for less than 15 minutes": ({"late": GROWS, "begun": STAYS}, "12m", False),
    "refused by another router": ({"late_elsewhere": GROWS, "begun": STAYS}, "25m", True),
    "another router begins some": (
        {"late": GROWS, "begun": STAYS, "begun_elsewhere": GROWS},
        "25m",
        False,
    ),
    "nothing is refused": ({"late": STAYS, "begun": STAYS}, "25m", False),
    "refused for another reason": ({"full": GROWS, "begun": STAYS}, "25m", False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_alert_fires_when_a_pool_gets_nothing(case: str, tmp_path: Path) -> None:
    values, at, fires = CASES[case]
    check(tmp_path, ALERT, series(rule="1x40", **values), at, FIRES if fires else None)


def check(
    tmp_path: Path,
    alert: str,
    given: list[dict[str, str]],
    at: str,
    fires: dict[str, str] | None,
) -> None:
    """`fires`: with these labels; None: not."""
    (rule,) = [one for one in RULES["spec"]["groups"][0]["rules"] if one["alert"] == alert]
    expected = []
    if fires is not None:
        texts = {name: filled(text, fires) for name, text in rule["annotations"].items()}
        expected = [{"exp_labels": fires, "exp_annotations": texts}]
    asked = {"eval_time": at, "alertname": alert, "exp_alerts": expected}
    evaluated(tmp_path, {"input_series": given, "alert_rule_test": [asked]})


def filled(text: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace("{{ $labels." + name + " }}", value)
    return text.strip()


def of_routers(metric: str, *values: str, labels: str = "") -> list[dict[str, str]]:
    name = 'kvrelay:%s{model_name="m",instance="%d"%s}'
    return [
        {"series": name % (metric, number, labels), "values": each}
        for number, each in enumerate(values)
    ]


DECODE = ',role="decode"'
OTHERS: dict[str, tuple[str, list[dict[str, str]], dict[str, str] | None]] = {
    "no router is ready": (
        "KvrelayServesNothing",
        of_routers("ready", "0x40", "0x40"),
        {"severity": "critical", "model_name": "m"},
    ),
    "one router is ready": ("KvrelayServesNothing", of_routers("ready", "0x40", "1x40"), None),
    "too much by what both routers were offered": (
        "KvrelayLacksWorkers",
        of_routers("saturation", "0.6x40", "0.6x40", labels=DECODE),
        {"severity": "warning", "model_name": "m", "role": "decode"},
    ),
    "enough workers": (
        "KvrelayLacksWorkers",
        of_routers("saturation", "0.4x40", "0.4x40", labels=DECODE),
        None,
    ),
    "too much for a moment": (
        "KvrelayLacksWorkers",
        of_routers("saturation", "0.4x12 2x5 0.4x23", labels=DECODE),
        None,
    ),
    "one router keeps a pair apart": (
        "KvrelayHandoffsFail",
        of_routers("pairs_quarantined", "0x40", "1x40"),
        {"severity": "warning", "model_name": "m"},
    ),
    "all pairs are trusted": (
        "KvrelayHandoffsFail",
        of_routers("pairs_quarantined", "0x40", "0x40"),
        None,
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_alert_fires_when_it_should(case: str, tmp_path: Path) -> None:
    alert, given, fires = OTHERS[case]
    check(tmp_path, alert, given, "25m", fires)


def query_of(way: str, role: str) -> str:
    """What KEDA asks for the pool of this role, or an adapter for its HPA."""
    file = KEDA if way == "keda" else HPAS
    (found,) = [
        one for one in yaml.safe_load_all(file.read_text()) if role in one["metadata"]["name"]
    ]
    if way == "keda":
        return str(found["spec"]["triggers"][0]["metadata"]["query"])
    return by_the_adapter(found["spec"]["metrics"][0]["external"]["metric"])


def by_the_adapter(metric: dict[str, Any]) -> str:
    """What prometheus-adapter makes of an HPA's metric by its rules."""
    rules = yaml.safe_load(HPAS.with_name("adapter.yaml").read_text())["rules"]["external"]
    (rule,) = [one for one in rules if one["name"]["as"] == metric["name"]]
    labels = metric["selector"]["matchLabels"].items()
    matchers = ",".join(f'{name}="{value}"' for name, value in labels)
    asked = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
    return str(asked).replace("<<.LabelMatchers>>", matchers)


DESIRED = 'kvrelay:desired_workers{model_name="m",pool="kvrelay-%s",role="%s",instance="%s"}'


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("way", ["keda", "hpa"])
def test_a_pool_is_scaled_by_the_sum_over_routers_and_roles(
    way: str, role: str, tmp_path: Path
) -> None:
    """Also of a worker whose role has changed: it counts to its own pool."""
    other = "decode" if role == "prefill" else "prefill"
    per_router = [
        {"series": DESIRED % (role, role, "a"), "values": "1.5x10"},
        {"series": DESIRED % (role, role, "b"), "values": "0.75x10"},
        {"series": DESIRED % (role, other, "a"), "values": "1x10"},
        {"series": DESIRED % (other, other, "a"), "values": "9x10"},
    ]
    asked = {
        "expr": query_of(way, role),
        "eval_time": "5m",
        "exp_samples": [{"labels": "{}", "value": 3.25}],
    }
    evaluated(tmp_path, {"input_series": per_router, "promql_expr_test": [asked]})
