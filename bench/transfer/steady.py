"""What many transfers leave behind in memory."""

from __future__ import annotations

from bench.report import Row
from bench.transfer.link import link
from bench.transfer.shape import Shape

STEADY_TOKENS = 32
STEADY_WARM_UP = 0.1
GROWTH_ALLOWED_MIB = 8.0


def steady_row(scheme: str, transfers: int, device: str) -> Row:
    """Small transfers, both ways in turn; the resident memory of both processes together."""
    with link(scheme, Shape(layers=2, tokens=STEADY_TOKENS, device=device)) as sender:

        def run(count: int) -> None:
            for number in range(count):
                sender.direct() if number % 2 else sender.collated()

        run(max(2, int(transfers * STEADY_WARM_UP)))
        before = sender.rss_bytes()
        run(transfers)
        growth_mib = (sender.rss_bytes() - before) / 2**20
    return Row(
        name=f"{scheme}: memory grown in {transfers} transfers",
        value=growth_mib,
        unit="MiB",
        against="allowed",
        against_value=GROWTH_ALLOWED_MIB,
        goal=1.0,
        lower_is_better=True,
        method=f"{STEADY_TOKENS} tokens of 2 layers each, collated and direct in turn, "
        "after a tenth as many to warm up",
    )
