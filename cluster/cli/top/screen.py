"""What `kvrelay top` shows: reports become rows of text, of at most 80 columns. Pure.

Several routers know the same workers: each worker is shown as the router knows it that heard from
it last, and requests are added up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from math import inf
from typing import Protocol

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.counters import speed_text
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1.inference_pb2 import LinkInfo


class Router(Protocol):
    """The latest report of one router, or why there is none; and one of some seconds `before`."""

    @property
    def address(self) -> str: ...

    @property
    def report(self) -> pb.WatchReport | None: ...

    @property
    def before(self) -> pb.WatchReport | None: ...

    @property
    def trouble(self) -> str: ...


STATES: Mapping[int, tuple[str, str]] = {
    pb.WORKER_STATE_UNSPECIFIED: ("unknown", "dim"),
    pb.WORKER_STATE_READY: ("ready", "green"),
    pb.WORKER_STATE_DRAINING: ("draining", "yellow"),
    pb.WORKER_STATE_SILENT: ("silent", "red"),
    pb.WORKER_STATE_QUARANTINED: ("quarant.", "magenta"),
}
"""# state |-> (its word, its colour)"""
ROLES = ("prefill", "decode", "both")
COLUMNS = ("worker", "role", "state", "run", "wait", "tokens", "KV used", "in/s", "out/s", "step")
NUMBERS = COLUMNS[3:]
TIER_COLUMNS = ("tier", "open", "admitted", "refused", "offered in/s", "out/s")
MOST_LINKS = 8
NAME_WIDTH = 16


def as_facts(routers: Sequence[Router]) -> dict[str, object]:
    """JSON: `kvrelay top --json`."""
    return {"routers": [_facts(one) for one in routers]}


def _facts(router: Router) -> dict[str, object]:
    report = router.report or pb.WatchReport()
    told = MessageToDict(
        report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    tiers = [_numbers(tier) for tier in report.tiers]
    facts = told | {"tiers": tiers} if router.report is not None else None
    return {"address": router.address, "trouble": router.trouble, "report": facts}


def _numbers(told: Message) -> dict[str, object]:
    """MessageToDict makes text of 64 bits."""
    found = {one.name: getattr(told, one.name) for one in told.DESCRIPTOR.fields}
    return {
        name: _numbers(value) if isinstance(value, Message) else value
        for name, value in found.items()
    }


def screen(routers: Sequence[Router]) -> RenderableType:
    reports = [one.report for one in routers if one.report is not None]
    parts: list[RenderableType] = [_router_line(one) for one in routers]
    if reports:
        parts += [Text(), _workers(merged(reports))]
        parts += [Text(), _tiers(reports, offered(routers))]
        parts += _links(merged(reports))
    return Group(*parts)


def merged(reports: Sequence[pb.WatchReport]) -> list[pb.WatchedWorker]:
    """By pool, then by number."""
    latest: dict[str, pb.WatchedWorker] = {}
    for worker in (worker for report in reports for worker in report.workers):
        known = latest.get(worker.info.incarnation)
        if known is None or _age_s(worker) < _age_s(known):
            latest[worker.info.incarnation] = worker
    return sorted(latest.values(), key=_order)


def _age_s(worker: pb.WatchedWorker) -> float:
    return worker.heard_ago_s if worker.HasField("heard_ago_s") else inf


def _order(worker: pb.WatchedWorker) -> tuple[str, int, str]:
    """A pool's workers are named POOL-0, POOL-1 and so on."""
    found = re.fullmatch(r"(.*?)-?(\d*)", worker.info.name)
    assert found is not None, worker.info.name
    return found[1], int(found[2] or 0), worker.info.incarnation


def _router_line(router: Router) -> Text:
    report = router.report
    if report is None:
        told = router.trouble or "no report yet"
        return Text.assemble(f"{router.address}: ", (f"{told}; trying again", "red"))
    state, colour = _router_state(report)
    waiting = report.waiting_requests + report.queued_prompts
    told = f", {report.open_requests} requests open, {waiting} waiting, up {report.uptime_s:.0f} s"
    return Text.assemble(f"{router.address}: ", (state, colour), told)


def _router_state(report: pb.WatchReport) -> tuple[str, str]:
    if report.leaving:
        return "leaving", "yellow"
    return (f"not ready: {report.not_ready}", "red") if report.not_ready else ("ready", "green")


def _workers(workers: Sequence[pb.WatchedWorker]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        width = NAME_WIDTH if column == "worker" else None
        right = column in NUMBERS
        table.add_column(
            column, justify="right" if right else "left", max_width=width, no_wrap=True
        )
    for worker in workers:
        table.add_row(*_row(worker))
    return table


def _row(worker: pb.WatchedWorker) -> Iterator[Text]:
    state, colour = STATES.get(worker.state, STATES[pb.WORKER_STATE_UNSPECIFIED])
    info = worker.info
    yield Text(info.name)
    yield Text(info.role)
    yield Text(state, style=colour)
    for count in (info.running, info.waiting, worker.waiting_tokens):
        yield Text(short(count))
    yield Text(f"{info.kv_used:.0%}")
    yield Text(short(info.prompt_tokens_per_s))
    yield Text(short(info.generated_tokens_per_s))
    yield Text(f"{worker.decode_step_s * 1e3:.3g} ms" if worker.HasField("decode_step_s") else "-")


def short(number: float) -> str:
    """At most five characters below 1,000 millions."""
    if number < 10_000:
        return f"{number:.0f}"
    return f"{number / 1e3:.0f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def offered(routers: Sequence[Router]) -> dict[str, tuple[float, float]]:
    """# tier |-> tokens of prompts and of answers that clients ask for each second, refused ones
    too, as far as routers have told it twice"""
    prompts, outputs = defaultdict[str, float](float), defaultdict[str, float](float)
    for report, before in ((one.report, one.before) for one in routers):
        if report is None or before is None or report.uptime_s <= before.uptime_s:
            continue
        were = {tier.name: tier.offered for tier in before.tiers}
        for tier in report.tiers:
            now, was = tier.offered, were.get(tier.name, pb.OfferedWork())
            passed_s = report.uptime_s - before.uptime_s
            prompts[tier.name] += (now.prompt_tokens - was.prompt_tokens) / passed_s
            outputs[tier.name] += (now.output_tokens - was.output_tokens) / passed_s
    return {name: (prompts[name], outputs[name]) for name in prompts}


def _tiers(reports: Sequence[pb.WatchReport], rates: Mapping[str, tuple[float, float]]) -> Table:
    """Sums over the routers."""
    sums: dict[str, list[int]] = {}
    for tier in (tier for report in reports for tier in report.tiers):
        counts = sums.setdefault(tier.name, [0, 0, 0])
        for i, count in enumerate((tier.open_requests, tier.admitted, tier.refused)):
            counts[i] += count
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in TIER_COLUMNS:
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, counts in sums.items():
        rate = [short(one) for one in rates[name]] if name in rates else ["-", "-"]
        table.add_row(name, *map(str, counts), *rate)
    return table


def _links(workers: Sequence[pb.WatchedWorker]) -> list[Text]:
    """The slowest ones of those that were measured."""
    found = [(one.info.name, link) for one in workers for link in one.info.links]
    measured = [(source, link) for source, link in found if link.bytes_per_s]
    links = sorted(measured, key=lambda one: one[1].bytes_per_s)
    if not links:
        return []
    some = f"the slowest {MOST_LINKS} of {len(links)} links"
    title = "links" if len(links) <= MOST_LINKS else some
    return [Text(), Text(title, style="bold"), *starmap(_link, links[:MOST_LINKS])]


def _link(source: str, link: LinkInfo) -> Text:
    speed, latency = speed_text(link.bytes_per_s), f"{link.latency_s * 1e6:.0f} us"
    return Text(f"{source} -> {link.peer} over {link.transport}: {speed}, {latency}")
