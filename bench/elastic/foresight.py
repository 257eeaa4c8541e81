"""How well the controller foresees what will be needed, beside statsmodels, on real traces.

    pip install statsmodels
    python -m bench.elastic.foresight conversation_trace.jsonl AzureLLMInferenceTrace_conv.csv

Each row: the mean absolute error of a way, over that of the last value, of the prompt tokens and
output tokens per second (means over 20 s) that are offered 20, 60 and 100 s later. `chosen` is what
the controller would have used. Days: the study's load, three of its days. statsmodels' ways are
fitted again to the last twenty minutes, every five.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from bench.elastic.loads import DAY_S, conversation, day
from cluster.core.elastic.forecast import (
    EVERY_S,
    Forecast,
    Foresees,
    Holt,
    LastValue,
    Seasonal,
)
from cluster.sim.trace import TraceRequest

LEADS_S = (20.0, 60.0, 100.0)
WINDOW = round(20.0 / EVERY_S)
FIRST = 120
"""Values before errors count: ten minutes."""
REFIT = 60
KNOWN = 240
Way = Callable[[Sequence[float], int], float]
"""All values so far, how many ahead |-> the foreseen one."""


def series(requests: Sequence[TraceRequest], output: bool) -> list[float]:
    """Tokens/s, every `EVERY_S`, each over the last 20 s."""
    last_s = max(one.arrival_s for one in requests)
    sums = [0.0] * (int(last_s / EVERY_S) + 1)
    for one in requests:
        sums[int(one.arrival_s / EVERY_S)] += one.output_tokens if output else one.input_tokens
    ends = range(WINDOW, len(sums))
    return [sum(sums[end - WINDOW : end]) / WINDOW / EVERY_S for end in ends]


def online(way: Foresees, values: Sequence[float], steps: int) -> list[float]:
    """What is foreseen at each value."""
    found = []
    for value in values:
        way.note(value)
        found.append(way.ahead(steps))
    return found


def chosen(values: Sequence[float], steps: int, period_s: float) -> list[float]:
    forecast, found = Forecast(period_s), []
    for number, value in enumerate(values):
        forecast.note(number * EVERY_S, value, steps * EVERY_S)
        found.append(forecast.ahead(steps * EVERY_S))
    return found


def refitted(way: Way, values: Sequence[float], steps: int) -> list[float]:
    """None are asked before `FIRST`; in between the last fit's change is added."""
    found, change = list(values[:FIRST]), 0.0
    for end in range(FIRST, len(values)):
        if (end - FIRST) % REFIT == 0:
            change = way(values[: end + 1], steps) - values[end]
        found.append(max(0.0, values[end] + change))
    return found


def holt_winters(values: Sequence[float], steps: int) -> float:
    from statsmodels.tsa.api import ExponentialSmoothing

    model = ExponentialSmoothing(list(values[-KNOWN:]), trend="add", damped_trend=True)
    return float(model.fit().forecast(steps)[-1])


def arima(values: Sequence[float], steps: int) -> float:
    from statsmodels.tsa.arima.model import ARIMA

    model = ARIMA(list(values[-KNOWN:]), order=(2, 1, 1))
    return float(model.fit().forecast(steps)[-1])


def seasonal_trend(period: int) -> Way:
    """Seasonal and trend by loess (Cleveland et al. 1990), and ARIMA for what is left. It needs two
    periods; before that it is the last value."""

    def way(values: Sequence[float], steps: int) -> float:
        from numpy import array
        from statsmodels.tsa.api import STLForecast
        from statsmodels.tsa.arima.model import ARIMA

        if len(values) < 2 * period:
            return values[-1]
        model = STLForecast(array(values), ARIMA, model_kwargs={"order": (1, 1, 0)}, period=period)
        return float(model.fit().forecast(steps)[-1])

    return way


def error(foreseen: Sequence[float], values: Sequence[float], steps: int) -> float:
    pairs = zip(foreseen[FIRST:], values[FIRST + steps :], strict=False)
    errors = [abs(then - one) for one, then in pairs]
    return sum(errors) / len(errors)


def rows(values: Sequence[float], period_s: float, lead_s: float) -> Iterator[tuple[str, float]]:
    steps, period = round(lead_s / EVERY_S), round(period_s / EVERY_S)
    yield "last value", error(online(LastValue(), values, steps), values, steps)
    yield "Holt", error(online(Holt(), values, steps), values, steps)
    yield "seasonal", error(online(Seasonal(period), values, steps), values, steps)
    yield "chosen", error(chosen(values, steps, period_s), values, steps)
    yield "statsmodels Holt", error(refitted(holt_winters, values, steps), values, steps)
    yield "statsmodels ARIMA", error(refitted(arima, values, steps), values, steps)
    if len(values) > 2 * period:
        stl = refitted(seasonal_trend(period), values, steps)
        yield "statsmodels STL", error(stl, values, steps)


def show(name: str, requests: Sequence[TraceRequest], period_s: float) -> None:
    for output in (False, True):
        values = series(requests, output)
        what = "output" if output else "prompt"
        jump = sum(abs(b - a) for a, b in pairwise(values)) / max(1.0, sum(values))
        print(f"{name}, {what} tokens/s: {len(values)} values, mean change {100 * jump:.1f} %")
        table = [dict(rows(values, period_s, lead_s)) for lead_s in LEADS_S]
        for way in table[0]:
            ratios = "  ".join(f"{one[way] / one['last value']:5.2f}" for one in table)
            print(f"  {way:20s} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path)
    args = parser.parse_args()
    import statsmodels.api  # noqa: F401  it sets filters of its own

    warnings.simplefilter("ignore")  # fits that did not converge count as they are
    print(f"seconds ahead: {', '.join(f'{one:g}' for one in LEADS_S)}")
    for path in args.traces:
        show(path.stem, conversation(path), DAY_S)
    days = [
        TraceRequest(
            arrival_s=one.arrival_s + n * DAY_S,
            input_tokens=one.input_tokens,
            output_tokens=one.output_tokens,
        )
        for n in range(3)
        for one in day(DAY_S / 60, seed=n + 1)
    ]
    show("three days", days, DAY_S)


if __name__ == "__main__":
    main()
