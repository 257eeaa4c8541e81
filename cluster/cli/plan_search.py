"""`kvrelay plan MODEL --trace T --slo ...`: its options, the search, and the tables it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from cluster.cli.options import Format
from cluster.config.types import parse_duration_s
from cluster.sim.planning.candidates import (
    fastest,
    fits,
    fleet_limits,
    kinds,
    servable_file,
    smallest,
)
from cluster.sim.planning.estimate import PlanObjectives, Workload, copies, workload
from cluster.sim.planning.settle import Settled, Task, parallel_enough, parallel_fastest
from cluster.sim.profiles.capacity import PlannedModel
from cluster.sim.profiles.load import known_device, known_shape
from cluster.sim.profiles.schema import DeviceProfile
from cluster.sim.readers import read_trace
from kvrelay.errors import ConfigError

_SEARCH_FILE_COLUMNS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command's options."""

    model: str
    gpus: str
    memory_fraction: float
    trace: Path | None
    slo: str | None
    attainment: float
    budget: float | None
    prices: tuple[str, ...]
    rate_scale: float
    limit: int | None
    tries: int
    processes: int | None
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`enough`: fleets that hold the SLO, cheapest first; `fastest`: those within the budget."""

    enough: list[Settled]
    fastest: list[Settled]


def search(facts: PlannedModel, asked: Asked, format_: Format) -> None:
    """Raises ConfigError when an option is wrong or no fleet holds the SLO."""
    task, work = _task(facts, asked)
    found = _search(task, work, asked)
    if not found.enough:
        raise ConfigError(
            f"no fleet of {asked.gpus} that was tried holds {asked.slo} for "
            f"{asked.attainment:.0%} of the requests: allow more devices, --tries or a looser --slo"
        )
    if asked.out is not None:
        _write(asked.out, found.enough[0], task, asked.memory_fraction)
    if format_ is Format.JSON:
        print(
            json.dumps(
                {name: list(map(_search_as_json, rows)) for name, rows in _named(found)}, indent=2
            )
        )
    else:
        _print_search(found)


def _named(found: Found) -> Iterable[tuple[str, list[Settled]]]:
    return (("cheapest", found.enough), ("fastest", found.fastest))


# --- the options --------------------------------------------------------------------------------


def _task(facts: PlannedModel, asked: Asked) -> tuple[Task, Workload]:
    if asked.trace is None or asked.slo is None:
        raise ConfigError("--trace and --slo: give both to search fleets, or none")
    requests = read_trace(asked.trace, asked.limit)
    task = Task(
        model=asked.model,
        facts=facts,
        requests=requests,
        rate_scale=asked.rate_scale,
        objectives=_objectives(asked.slo, asked.attainment),
        stock=_stock(asked.gpus),
    )
    return task, workload(requests, asked.rate_scale)


def _objectives(slo: str, attainment: float) -> PlanObjectives:
    try:
        ttft_s, tpot_s = (parse_duration_s(part.strip()) for part in slo.split(","))
    except ValueError:
        raise ConfigError(f"--slo {slo}: expected TTFT,TPOT such as 2s,100ms") from None
    return PlanObjectives(ttft_s=ttft_s, tpot_s=tpot_s, attainment=attainment)


def _stock(gpus: str) -> dict[str, int]:
    """# device |-> number in stock"""
    stock = {}
    for part in gpus.split(","):
        name, _, count = part.strip().partition(":")
        if not (count.isdecimal() and int(count)):
            raise ConfigError(f"--gpus {part}: expected NAME:COUNT, such as h100-sxm:8")
        stock[name] = int(count)
    return stock


def _devices(stock: Iterable[str], prices: Sequence[str]) -> dict[str, DeviceProfile]:
    devices = {name: known_device(name) for name in stock}
    for text in prices:
        name, _, number = text.partition("=")
        try:
            update = {"price_per_hour": float(number)}
        except ValueError:
            raise ConfigError(f"--price {text}: expected NAME=NUMBER") from None
        if name not in devices:
            raise ConfigError(f"--price {text}: {name} is not among --gpus")
        devices[name] = devices[name].model_copy(update=update)
    return devices


# --- the search ---------------------------------------------------------------------------------


def _search(task: Task, work: Workload, asked: Asked) -> Found:
    """Arithmetic orders all kinds of fleets; the first `tries` of them are simulated."""
    ways = copies(
        task.facts,
        _devices(task.stock, asked.prices),
        task.stock,
        work.longest,
        fleet_limits(task.facts, asked.memory_fraction),
    )
    possible = list(kinds(ways, work, task.objectives))
    processes = asked.processes or cpu_count() or 1
    fleets = [
        fleet for kind in possible if fits(fleet := smallest(kind, work.rate_per_s), task.stock)
    ]
    fleets.sort(key=lambda fleet: fleet.price_per_hour)
    enough = parallel_enough(task, fleets[: asked.tries], processes)
    if asked.budget is None:
        return Found(enough=enough, fastest=[])
    most = [fastest(kind, asked.budget, task.stock) for kind in possible]
    within = [fleet for fleet in most if fleet is not None]
    within.sort(key=lambda fleet: -fleet.most_rate_per_s)
    return Found(enough=enough, fastest=parallel_fastest(task, within[: asked.tries], processes))


# --- how it is shown ----------------------------------------------------------------------------


def _write(path: Path, settled: Settled, task: Task, memory_fraction: float) -> None:
    limits = fleet_limits(task.facts, memory_fraction)
    raw = servable_file(settled.fleet, task.model, task.facts, task.objectives, limits)
    head = f"# {settled.fleet}\n"
    if known_shape(task.model) is not None:
        head += f"# {task.model} is a shape: kvrelay serve needs a folder or hub id as model.path\n"
    path.write_text(head + yaml.safe_dump(raw, sort_keys=False))


def _print_search(found: Found) -> None:
    console = Console(width=None if sys.stdout.isatty() else _SEARCH_FILE_COLUMNS, highlight=False)
    console.print(_table("cheapest that hold the SLO", found.enough))
    if found.fastest:
        console.print(_table("best goodput within the budget", found.fastest))


_SEARCH_HEADINGS = (
    "fleet",
    "per hour",
    "devices",
    "x rate",
    "attained",
    "goodput",
    "TTFT p90",
    "TPOT p90",
    "per M tokens",
    "kWh per M tokens",
)


def _table(title: str, rows: Sequence[Settled]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in _SEARCH_HEADINGS:
        table.add_column(heading, justify="left" if heading == "fleet" else "right")
    for row in rows:
        table.add_row(*_search_cells(row))
    return table


def _search_cells(row: Settled) -> tuple[str, ...]:
    report = row.report
    price, energy = report.cost.price_per_million_tokens, report.cost.kwh_per_million_tokens
    return (
        str(row.fleet),
        f"{row.fleet.price_per_hour:.2f}",
        str(row.fleet.devices.total()),
        f"{row.rate_scale:.3g}",
        f"{report.attainment:.1%}",
        f"{report.goodput_per_s:.2f}/s",
        f"{report.ttft_s.p90:.3f} s" if report.ttft_s else "",
        f"{report.tpot_s.p90 * 1e3:.1f} ms" if report.tpot_s else "",
        "" if price is None else f"{price:.3f}",
        "" if energy is None else f"{energy:.3f}",
    )


def _search_as_json(row: Settled) -> dict[str, object]:
    report = {key: value for key, value in asdict(row.report).items() if key != "timeline"}
    return {
        "fleet": str(row.fleet),
        "price_per_hour": row.fleet.price_per_hour,
        "devices": dict(row.fleet.devices),
        "rate_scale": row.rate_scale,
        "report": report,
    }
