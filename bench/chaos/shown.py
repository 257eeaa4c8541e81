"""A run's figures as text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.chaos.judged import PauseRow, Pauses, capacity_gone, longest_gaps_s, pause_rows, wrong
from bench.chaos.run import Found, Plan
from bench.chaos.streams import Outcome, StreamRecord

MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run must not have. `unasked`: processes that ended though no fault ended them."""

    failed: list[StreamRecord]
    wrong: list[tuple[StreamRecord, str]]
    leaked: list[str]
    unasked: list[str]

    @property
    def is_good(self) -> bool:
        return not (self.failed or self.wrong or self.leaked or self.unasked)


def verdict(found: Found) -> Verdict:
    return Verdict(
        failed=[one for one in found.records if one.outcome is Outcome.FAILED],
        wrong=wrong(found.records, found.expected),
        leaked=found.leaked,
        unasked=[str(end) for end in found.ended if not end.asked] + found.not_ended,
    )


def show(plan: Plan, found: Found, given: Verdict) -> None:
    for line in _lines(plan, found, given):
        print(line)
    rows = pause_rows(found.records, found.seen)
    Console(width=150).print(_table(rows, longest_gaps_s(found.calm)))
    for title, lines in _troubles(given):
        for line in lines[:MOST_SHOWN]:
            print(f"{title}: {line}")
        if len(lines) > MOST_SHOWN:
            print(f"{title}: {len(lines) - MOST_SHOWN} more")
    print(f"logs of all processes: {plan.logs}")


def _lines(plan: Plan, found: Found, given: Verdict) -> Iterator[str]:
    live = sorted(found.live) or [0]
    gone_s = capacity_gone(
        found.seen, plan.shape.prefill + plan.shape.decode, _end_s(found), RESTART_S
    )
    faults = f"{len(found.seen)} faults, one every {plan.every_s:g} s"
    yield f"{plan.lengths}; seed {plan.seed}; {faults}"
    yield (
        f"offered {len(found.records)} at {plan.share:g} x {found.capacity_per_s:.2f}/s for "
        f"{found.load_s:.0f} s, {found.topped_up} of them to have {plan.streams} live; live at a "
        f"fault: least {live[0]}, median {live[len(live) // 2]}, most {live[-1]}"
    )
    yield (
        f"completed {found.count(Outcome.COMPLETED)}, refused {found.count(Outcome.REFUSED)}, "
        f"failed {len(given.failed)}, wrong {len(given.wrong)}, leaked {len(given.leaked)}, "
        f"processes that ended by themselves {len(given.unasked)}"
    )
    yield (
        f"capacity that was gone: {gone_s:.0f} s of all workers, that of "
        f"{gone_s * found.capacity_per_s:.0f} requests; without faults none was refused"
    )
    checked = [one for one in found.records if one.index in found.expected]
    yield (
        f"compared {len(checked)} streams with the run without faults; "
        f"{found.unrepeatable} requests without expectation; inexact by another class of worker 0: "
        "there is one class"
    )
    load = ", ".join(f"{one:.0f}" for one in os.getloadavg())
    lag = f"the clients' own longest pause: {1000 * found.lag_s:.0f} ms"
    yield f"{lag}; {os.cpu_count()} cores, load average with all else on the machine {load}"


RESTART_S = 8.0
"""About what a worker needs to be back, with its second of waiting."""


def _end_s(found: Found) -> float:
    return max((one.ended_s for one in found.records), default=0.0)


def _table(rows: list[PauseRow], calm: Pauses) -> Table:
    table = Table(title="longest pause of each stream, s")
    for name in ("fault", "streams", "faults"):
        table.add_column(name)
    for name in ("n", "p50", "p99", "max", "n alone", "p50", "p99", "max", "goal", "p99/goal"):
        table.add_column(name, justify="right")
    table.add_row("none", "all", "", *_cells(calm), "", "", "", "", "", "")
    for row in rows:
        judged = row.alone if row.alone.values_s else row.all
        ratio = f"{judged.quantile(0.99) / row.goal_s:.2f}" if row.goal_s else ""
        goal = f"{row.goal_s:g}" if row.goal_s else ""
        cells = [*_cells(row.all), *_cells(row.alone), goal, ratio]
        table.add_row(row.group, row.whose, str(row.faults), *cells)
    return table


def _cells(pauses: Pauses) -> list[str]:
    if not pauses.values_s:
        return ["0", "", "", ""]
    shown = [pauses.quantile(share) for share in (0.5, 0.99, 1.0)]
    return [str(len(pauses.values_s)), *(f"{value:.2f}" for value in shown)]


def _troubles(given: Verdict) -> list[tuple[str, list[str]]]:
    failed = Counter(one.error for one in given.failed)
    first = {one.error: one.request_id for one in reversed(given.failed)}
    return [
        ("failed", [f"{n} x {error} [{first[error]}]" for error, n in failed.most_common()]),
        ("wrong", [f"{one.request_id} ({one.outcome}): {why}" for one, why in given.wrong]),
        ("leaked", given.leaked),
        ("ended by itself", given.unasked),
    ]
