"""`kvrelay plan`: which devices hold a model, and which fleet serves a trace for least."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import Format, FormatOption

if TYPE_CHECKING:
    from cluster.sim.profiles.capacity import CopyCapacity, PlannedModel, Refusals, Unfit
    from cluster.sim.profiles.schema import Dtype


_DEFAULT_DEVICES = "h200-sxm,h100-sxm,a100-80gb-sxm,l40s"
_FILE_COLUMNS = 140
_GB = 1e9

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or a name such as llama-2-70b.")
]
DevicesOption = Annotated[
    str, typer.Option("--gpus", help="Device names, separated by commas; with --trace NAME:COUNT.")
]
ContextOption = Annotated[int, typer.Option("--context", min=1, help="Tokens in a sequence.")]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="Format of the weights, such as float8. Default: as stored."),
]
KvOption = Annotated[
    str | None, typer.Option("--kv", help="Format of the KV cache. Default: float16.")
]
FractionOption = Annotated[
    float, typer.Option("--memory-fraction", min=0.01, max=1.0, help="Share of its memory to use.")
]
_TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Search fleets for these requests; needs --slo.")
]
SloOption = Annotated[
    str | None, typer.Option("--slo", metavar="TTFT,TPOT", help="Objectives, such as 2s,100ms.")
]


def plan(
    model: ModelArgument,
    gpus: DevicesOption = _DEFAULT_DEVICES,
    context: ContextOption = 4096,
    weights: WeightsOption = None,
    kv: KvOption = None,
    memory_fraction: FractionOption = 0.9,
    trace: _TraceOption = None,
    slo: SloOption = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="The share of requests that must meet the SLO.")
    ] = 0.9,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, help="Price per hour; also find the best goodput within it."),
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="Price of a device per hour.")
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(min=0.001, help="Multiply the trace's rate by this.")
    ] = 1.0,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only the first N requests.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="Fleets to simulate.")] = 12,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes for simulations. Default: one per CPU.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the cheapest plan's cluster file.")
    ] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Print a model's weights and KV, which devices hold them, and how fast they could be.

    With --trace, --slo and --gpus NAME:COUNT,...: search roles, degrees of parallelism and mixes of
    devices for the cheapest fleet that holds the SLO, by simulation.
    """
    from cluster.cli.plan_search import Asked, search
    from cluster.sim.planning.model_facts import find_facts
    from kvrelay.errors import ModelError

    facts = find_facts(model, weights=_dtype(weights), kv=_dtype(kv))
    if trace is None and slo is None:
        _plan_alone(facts, gpus, context, memory_fraction, format_)
        return
    if facts.refusals.refused:
        raise ModelError(f"no fleet can serve {model}: {facts.refusals.refused}")
    asked = Asked(
        model=model,
        gpus=gpus,
        memory_fraction=memory_fraction,
        trace=trace,
        slo=slo,
        attainment=attainment,
        budget=budget,
        prices=tuple(price or ()),
        rate_scale=rate_scale,
        limit=limit,
        tries=tries,
        processes=processes,
        out=out,
    )
    search(facts, asked, format_)


def _plan_alone(
    facts: PlannedModel, gpus: str, context: int, memory_fraction: float, format_: Format
) -> None:
    from cluster.sim.profiles.capacity import smallest_copy
    from cluster.sim.profiles.load import known_device
    from cluster.sim.profiles.worker_memory import planned_limits

    names = [name.strip() for name in gpus.split(",")]
    limits = planned_limits(memory_fraction)
    copies = {
        name: smallest_copy(facts, name, known_device(name), context, limits) for name in names
    }
    if format_ is Format.JSON:
        print(json.dumps(_as_json(facts, copies), indent=2))
    else:
        _print(facts, copies, context)


def _dtype(given: str | None) -> Dtype | None:
    """Raises ConfigError, which names the known formats."""
    from cluster.sim.profiles.schema import BYTES_PER_PARAMETER
    from kvrelay.errors import ConfigError

    for known in BYTES_PER_PARAMETER:
        if known == given:
            return known
    if given is None:
        return None
    raise ConfigError(f"{given}: unknown format, expected one of {', '.join(BYTES_PER_PARAMETER)}")


def _as_json(facts: PlannedModel, copies: dict[str, CopyCapacity | Unfit]) -> dict[str, object]:
    unfit = _unfit(copies)
    return {
        "model": facts.shape.name,
        "parameters": facts.shape.parameters,
        "active_parameters": facts.shape.active_parameters + facts.shape.head_parameters,
        "precision": asdict(facts.precision),
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "state_bytes_per_sequence": facts.shape.state_bytes_per_sequence,
        "refused": facts.refusals.refused,
        "tensor_degrees": facts.refusals.degrees,
        "unsplit": facts.refusals.unsplit,
        "stage_counts": facts.refusals.stages,
        "unstaged": facts.refusals.unstaged,
        "devices": [asdict(copy) for name, copy in copies.items() if name not in unfit],
        "unfit": unfit,
    }


def _unfit(copies: dict[str, CopyCapacity | Unfit]) -> dict[str, str]:
    """# device |-> why"""
    from cluster.sim.profiles.capacity import Unfit

    return {name: copy.why for name, copy in copies.items() if isinstance(copy, Unfit)}


def _print(facts: PlannedModel, copies: dict[str, CopyCapacity | Unfit], context: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from cluster.sim.profiles.capacity import CopyCapacity

    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS, highlight=False)
    for line in _facts_lines(facts):
        console.print(line, markup=False)
    table = Table(box=None, title=f"at {context:,} tokens of context", title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "device" else "right")
    for name, copy in copies.items():
        table.add_row(*(_cells(copy) if isinstance(copy, CopyCapacity) else (name, "unfit")))
    console.print(table)
    for name, why in _unfit(copies).items():
        console.print(f"{name}, {why}", markup=False, soft_wrap=True)
    console.print("bounds: every rate of the data sheet reached, no overheads", markup=False)


_HEADINGS = (
    "device",
    "devices",
    "weights each",
    "KV tokens",
    "batch",
    "TPOT alone",
    "TPOT of batch",
    "decode tok/s",
    "prefill",
    "prefill tok/s",
)


def _cells(copy: CopyCapacity) -> tuple[str, ...]:
    return (
        copy.device,
        str(copy.devices),
        f"{copy.weight_bytes_per_device / _GB:.4g} GB",
        f"{copy.kv_tokens:,}",
        f"{copy.batch:,}",
        f"{copy.least_tpot_s * 1e3:.2f} ms",
        f"{copy.batch_tpot_s * 1e3:.2f} ms",
        f"{copy.decode_tokens_per_s:,.0f}",
        f"{copy.prefill_s * 1e3:.1f} ms",
        f"{copy.prefill_tokens_per_s:,.0f}",
    )


def _facts_lines(facts: PlannedModel) -> list[str]:
    shape = facts.shape
    active = shape.active_parameters + shape.head_parameters
    lines = [
        *_refused_lines(facts.refusals),
        f"{shape.name}: {shape.parameters / 1e9:.4g} billion parameters, {active / 1e9:.4g} active",
        f"weights  {facts.weight_bytes / _GB:.4g} GB ({facts.precision.weights})",
        f"KV       {facts.kv_bytes_per_token:,.0f} B per token ({facts.precision.kv})",
    ]
    if shape.state_bytes_per_sequence:
        lines.append(f"state    {shape.state_bytes_per_sequence:,} B per sequence")
    for why in dict.fromkeys(facts.refusals.unsplit.values()):
        lines.append(f"tensor   {_listed(facts.refusals.degrees)}: {why}")
    for why in dict.fromkeys(facts.refusals.unstaged.values()):
        lines.append(f"stages   {_listed(facts.refusals.stages)}: {why}")
    return lines


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts))


def _refused_lines(refusals: Refusals) -> list[str]:
    if not refusals.refused:
        return []
    return [f"serve refuses this model: {refusals.refused}", "an estimate all the same:"]
