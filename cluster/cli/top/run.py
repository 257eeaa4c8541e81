"""The loop of `kvrelay top`: shows the latest reports until Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from cluster.cli.top.screen import as_facts, screen
from cluster.watch.follow import Following, followed
from kvrelay.access.values import Access
from kvrelay.errors import KvrelayError

ANSWER_S = 10.0
PLAIN_WIDTH = 80


def run_top(
    addresses: Sequence[str], access: Access, interval_s: float, *, once: bool, as_json: bool
) -> None:
    """Raises KvrelayError for `once` when no router answers, and for a router that refuses."""
    with followed(addresses, interval_s, access) as following:
        try:
            following.wait_first(ANSWER_S)
            if once:
                _show_once(following, as_json)
            elif as_json:
                _lines(following, interval_s)
            else:
                _live(following, interval_s)
        except KeyboardInterrupt:
            return


def _show_once(following: Following, as_json: bool) -> None:
    routers = following.now()
    if all(one.report is None for one in routers):
        told = (f"{one.address}: {one.trouble or 'no router answers'}" for one in routers)
        raise KvrelayError("; ".join(told))
    if as_json:
        print(json.dumps(as_facts(routers), indent=2))
    else:
        _console().print(screen(routers))


def _lines(following: Following, interval_s: float) -> None:
    """One line of JSON for each change."""
    while True:
        print(json.dumps(as_facts(following.now())), flush=True)
        following.wait_news(2 * interval_s)


def _live(following: Following, interval_s: float) -> None:
    console = _console()
    if not console.is_terminal:
        while True:
            console.print(screen(following.now()), "")
            following.wait_news(2 * interval_s)
    with Live(screen(following.now()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            following.wait_news(2 * interval_s)
            live.update(screen(following.now()), refresh=True)


def _console() -> Console:
    """Plain lines where the output is no terminal."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console
