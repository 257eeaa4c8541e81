"""What a client may write as an objective, at either face."""

from __future__ import annotations

import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.types import NO_OBJECTIVES, Objectives
from kvrelay.v1 import inference_pb2 as pb
from router.grpc_api.messages import objectives_in
from router.text.request_fields import FIELDS, HEADERS, MOST_MS, objectives_of


def test_milliseconds_become_seconds() -> None:
    given = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5", "x-deadline-ms": str(MOST_MS)}
    asked = objectives_of(given, HEADERS)
    assert asked == Objectives(ttft_s=0.25, tpot_s=0.0125, deadline_s=MOST_MS / 1000)
    assert objectives_of({"x-other": "1"}, HEADERS) == NO_OBJECTIVES


@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1s", str(MOST_MS + 1)])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-deadline-ms"])
def test_what_is_no_time_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be milliseconds, over 0") as invalid:
        objectives_of({name: value}, HEADERS)
    assert invalid.value.param == name


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_fields_of_grpc_are_checked_alike(value: float) -> None:
    with pytest.raises(InvalidRequest, match="at most 86400000, not") as invalid:
        objectives_in(pb.Slo(deadline_ms=value), None)
    assert invalid.value.param == FIELDS.deadline == "slo.deadline_ms"


def test_the_earlier_of_two_deadlines_counts() -> None:
    asked = pb.Slo(ttft_ms=5, deadline_ms=2000)
    assert objectives_in(asked, None).deadline_s == 2.0
    assert objectives_in(asked, 3.0).deadline_s == 2.0
    assert objectives_in(asked, 1.0) == Objectives(ttft_s=0.005, deadline_s=1.0)
    assert objectives_in(pb.Slo(), 0.0) == Objectives(deadline_s=0.0)
    assert objectives_in(pb.Slo(), None) == NO_OBJECTIVES
