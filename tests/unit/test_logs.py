"""Log lines: date, time, process, request; refusals in bursts."""

from __future__ import annotations

import asyncio
import logging
import re
from datetime import datetime

import pytest

from cluster.process.logs import LineFormatter
from router.live import refusal_log
from router.live.refusal_log import RefusalBursts, RefusalLog


def _line(**extra: object) -> str:
    record = logging.LogRecord("router", logging.WARNING, __file__, 1, "lost %s", ("x",), None)
    record.__dict__.update(extra)
    return LineFormatter("prefill-0").format(record)


def test_a_line_has_date_and_time_in_iso_form() -> None:
    when, rest = _line().split(" ", 1)
    assert datetime.fromisoformat(when).tzinfo is not None
    assert abs(datetime.fromisoformat(when).timestamp() - datetime.now().timestamp()) < 60
    assert rest == "prefill-0 WARNING lost x"


def test_a_line_ends_with_its_request() -> None:
    assert _line(request_id="cmpl-1").endswith(" prefill-0 WARNING lost x [cmpl-1]")
    assert _line(request_id=None).endswith(" lost x")


def test_a_traceback_follows_the_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    lines = _line(request_id="cmpl-1", exc_info=info).splitlines()
    assert lines[0].endswith("lost x [cmpl-1]") and lines[-1] == "  ValueError: broken"


def test_no_request_can_forge_a_line() -> None:
    """Neither by its id nor by what an error quotes."""
    forged = "x\n2026-01-01T00:00:00 router INFO all is well\r\x1b[2J\u2028\udc00"
    assert len(_line(request_id=forged).splitlines()) == 1
    assert r"[x\n2026-01-01T00:00:00 router INFO all is well\r\x1b[2J\u2028\udc00]" in _line(
        request_id=forged
    )
    try:
        raise ValueError(forged)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    _, *others = _line(exc_info=info).splitlines()
    assert all(line.startswith("  ") for line in others)


def test_refusals_are_counted_by_reason() -> None:
    bursts = RefusalBursts()
    assert bursts.take() is None
    bursts.add("ttft_unreachable", "free", "a")
    bursts.add("slots_exhausted", "", "b")
    bursts.add("ttft_unreachable", "free", "c")
    line = bursts.take()
    assert line is not None and line.request_id == "a"
    assert line.text == (
        "refused 3 requests: 2 ttft_unreachable (free), 1 slots_exhausted; the first one:"
    )
    assert bursts.take() is None


def test_one_refusal_is_named_alone() -> None:
    bursts = RefusalBursts()
    bursts.add("draining", "", "a")
    assert bursts.take() == ("refused 1 request: 1 draining", "a")


def test_a_burst_takes_a_line_at_once_and_one_for_each_period(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusal_log, "PERIOD_S", 0.01)
    caplog.set_level(logging.INFO, logger="router")

    async def burst() -> None:
        refusals = RefusalLog()
        for i in range(100):
            refusals.refused("no_capacity", "", f"r{i}")
        async with asyncio.timeout(30):
            while len(caplog.messages) < 2:
                await asyncio.sleep(0.001)
        refusals.refused("draining", "", "last")
        refusals.close()

    asyncio.run(burst())
    counts = [int(re.findall(r"refused (\d+) request", line)[0]) for line in caplog.messages]
    assert counts == [1, 99, 1]
    assert [record.__dict__["request_id"] for record in caplog.records] == ["r0", "r1", "last"]
