"""Plots of simulations, as PNG files. Needs kvrelay[plots]."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from cluster.sim.ledgers import Outcome
from cluster.sim.report import Report
from kvrelay.errors import ConfigError


def check_can_draw() -> None:
    """Raises ConfigError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--out draws with matplotlib: pip install 'kvrelay[plots]'")


def draw(folder: Path, reports: Sequence[Report], outcomes: Sequence[Sequence[Outcome]]) -> None:
    """timeline.png and cdf.png of each rate; goodput.png when there are several."""
    import matplotlib

    matplotlib.use("agg")
    for one, each in zip(reports, outcomes, strict=True):
        mark = f"-{one.rate_scale:g}x" if len(reports) > 1 else ""
        _timeline(folder / f"timeline{mark}.png", one)
        _cdfs(folder / f"cdf{mark}.png", each)
    if len(reports) > 1:
        _goodput(folder / "goodput.png", reports)


def _timeline(path: Path, one: Report) -> None:
    import matplotlib.pyplot as plt

    figure, (queues, blocks) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    at_s = [look.at_s for look in one.timeline]
    queues.plot(at_s, [look.awaiting_prefill for look in one.timeline], label="awaiting prefill")
    queues.plot(at_s, [look.decoding for look in one.timeline], label="decoding")
    queues.plot(at_s, [look.awaiting_decode for look in one.timeline], label="awaiting decode")
    queues.set_ylabel("requests")
    queues.legend()
    blocks.plot(at_s, [look.free_blocks for look in one.timeline])
    blocks.set_ylabel("blocks to be had")
    blocks.set_xlabel("seconds")
    figure.savefig(path)
    plt.close(figure)


def _cdfs(path: Path, outcomes: Sequence[Outcome]) -> None:
    import matplotlib.pyplot as plt

    kinds = (
        ("TTFT (s)", [one.ttft_s for one in outcomes]),
        ("TPOT (s)", [one.tpot_s for one in outcomes]),
        ("end to end (s)", [one.e2e_s for one in outcomes]),
    )
    figure, axes = plt.subplots(1, len(kinds), sharey=True, figsize=(12, 4))
    for axis, (name, values) in zip(axes, kinds, strict=True):
        known = sorted(value for value in values if value is not None)
        axis.plot(known, [(i + 1) / len(known) for i in range(len(known))])
        axis.set_xlabel(name)
    axes[0].set_ylabel("share of requests")
    figure.savefig(path)
    plt.close(figure)


def _goodput(path: Path, reports: Sequence[Report]) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    offered = [one.offered_per_s for one in reports]
    axis.plot(offered, [one.goodput_per_s for one in reports], marker="o", label="goodput")
    axis.plot(offered, offered, linestyle=":", label="offered")
    axis.set_xlabel("offered requests per second")
    axis.set_ylabel("requests per second that met their objectives")
    axis.legend()
    figure.savefig(path)
    plt.close(figure)
