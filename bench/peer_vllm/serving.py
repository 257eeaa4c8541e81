"""The same two cores arranged in four ways, behind HTTP: split and aggregated, ours and vLLM's.

Split: a prefill and a decode worker, a core each. Aggregated: one worker (vLLM: one server) that
does both with a thread on each core. Prompts and arrivals are the same; one is at work at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from bench.models import SMOLLM_135M
from bench.peer_vllm.process import peer_model
from bench.peer_vllm.servers import PREFILLED, vllm_aggregated, vllm_split
from bench.report import Reading, Row
from bench.serving.http_load import SendOne, Sent, all_at_once, arriving, send
from bench.serving.plain_cluster import HANDED_OVER, WorkerPlan, plain_cluster
from bench.serving.serve import LOAD, MODEL, SETTINGS, SPLIT

MAX_MODEL_LEN = 2304
REQUESTS = 32
LONG_OUTPUT = 16
CORES = (0, 1)
OUR_SPLIT, OUR_WHOLE = "1 prefill + 1 decode", "1 worker of role both"
PEER_SPLIT, PEER_WHOLE = "vLLM's split", "vLLM's server on both cores"
TTFT_TIMES, TPOT_TIMES = 5.0, 3.0
"""The objectives, as multiples of what vLLM takes without load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    ttft_s: float
    tpot_s: float

    def kept(self, one: Sent) -> bool:
        return one.ttft_s <= self.ttft_s and one.tpot_s <= self.tpot_s

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s:.2g} s, TPOT {1000 * self.tpot_s:.2g} ms"


@dataclass(slots=True, kw_only=True)
class Arm:
    """`turn`: what lets it work."""

    send_one: SendOne
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    rates: list[float] = field(default_factory=list)
    loops: list[tuple[float, list[Sent]]] = field(default_factory=list)
    long: list[Sent] = field(default_factory=list)

    def warm_up(self, prompts: Sequence[list[int]]) -> Sent:
        """The last of a few alone."""
        with self.turn():
            return [all_at_once(self.send_one, [one], 32)[0] for one in prompts][-1]

    def measure(self, prompts: list[list[int]], long: list[int], rate_per_s: float) -> None:
        with self.turn():
            seconds, sent = _timed(partial(all_at_once, self.send_one, prompts, LOAD.output_tokens))
            self.rates.append(sum(len(one.token_s) for one in sent) / seconds)
            loop = partial(arriving, self.send_one, prompts, LOAD.output_tokens)
            self.loops.append(_timed(partial(loop, rate_per_s=rate_per_s)))
            self.long += all_at_once(self.send_one, [long], LONG_OUTPUT)

    @property
    def throughput(self) -> Reading:
        return Reading(values=tuple(self.rates))

    def goodput(self, objectives: Objectives) -> Reading:
        """Requests per second that kept both."""
        kept = ((sum(map(objectives.kept, sent)), seconds) for seconds, sent in self.loops)
        return Reading(values=tuple(count / seconds for count, seconds in kept))

    def median(self, pick: Callable[[Sent], float]) -> Reading:
        """Of each open loop the median, in milliseconds."""
        return Reading(
            values=tuple(1000 * statistics.median(map(pick, sent)) for _, sent in self.loops)
        )


def _timed(run: Callable[[], list[Sent]]) -> tuple[float, list[Sent]]:
    begun_s = time.perf_counter()
    sent = run()
    return time.perf_counter() - begun_s, sent


def versus_vllm(repeats: int, rate_per_s: float) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(2, SMOLLM_135M.vocab_size, (2048,), generator=generator).tolist()
    prompts = LOAD.prompts().tolist()
    with ExitStack() as stack:
        arms = _arms(stack)
        alone = {name: arm.warm_up(prompts[:3]) for name, arm in arms.items()}
        for _ in range(repeats):
            for arm in arms.values():
                arm.measure(prompts, long, rate_per_s)
    peer_alone = alone[PEER_SPLIT]
    objectives = Objectives(
        ttft_s=TTFT_TIMES * peer_alone.ttft_s, tpot_s=TPOT_TIMES * peer_alone.tpot_s
    )
    split, its = arms[OUR_SPLIT], arms[PEER_SPLIT]
    return [
        *_load_rows(split, its, objectives, rate_per_s),
        *_gap_rows(split, its),
        *_aggregated_rows(arms, rate_per_s),
    ]


def _arms(stack: ExitStack) -> dict[str, Arm]:
    folder = peer_model()
    split = stack.enter_context(vllm_split(folder, MAX_MODEL_LEN, REQUESTS))
    whole = stack.enter_context(vllm_aggregated(folder, MAX_MODEL_LEN, REQUESTS, CORES))
    ours = stack.enter_context(plain_cluster(folder, SPLIT, SETTINGS, router_settings=HANDED_OVER))
    our_whole = stack.enter_context(
        plain_cluster(folder, [WorkerPlan(role="both", cores=CORES)], SETTINGS)
    )
    return {
        OUR_SPLIT: Arm(send_one=partial(send, ours.http_port)),
        PEER_SPLIT: Arm(send_one=split.send, turn=split.at_work),
        OUR_WHOLE: Arm(send_one=partial(send, our_whole.http_port)),
        PEER_WHOLE: Arm(send_one=whole.send, turn=whole.at_work),
    }


def _load_rows(own: Arm, its: Arm, objectives: Objectives, rate_per_s: float) -> list[Row]:
    at_once = f"{MODEL}, one core each, in turn; 16 requests of 512 in, 64 out"
    arriving_ = f"{at_once}, Poisson arrivals at {rate_per_s:g}/s, same seed"
    rates = [arm.throughput for arm in (own, its)]
    good = [arm.goodput(objectives) for arm in (own, its)]
    kept = f"{arriving_}; kept are {objectives}"
    return [
        _row("output tokens/s, all at once", "tokens/s", rates, at_once, goal=1.2),
        _row("goodput", "requests/s", good, kept, goal=1.2),
        _row("TTFT, median", "ms", _both(own, its, lambda one: one.ttft_s), arriving_),
        _row("TPOT, median", "ms", _both(own, its, lambda one: one.tpot_s), arriving_),
        _row("gap between token 1 and 2", "ms", _both(own, its, _first_gap_s), arriving_, goal=1.0),
    ]


def _aggregated_rows(arms: dict[str, Arm], rate_per_s: float) -> list[Row]:
    """Each arrangement of ours beside vLLM's one server on both cores."""
    its = arms[PEER_WHOLE]
    method = (
        f"{MODEL}, the same two cores; 16 requests of 512 in, 64 out, at once and as Poisson "
        f"arrivals at {rate_per_s:g}/s"
    )
    return [
        row for name in (OUR_WHOLE, OUR_SPLIT) for row in _beside(name, arms[name], its, method)
    ]


def _beside(name: str, own: Arm, its: Arm, method: str) -> list[Row]:
    def row(what: str, unit: str, found: list[Reading]) -> Row:
        return _compared(f"{what}, {name}", unit, found, method, against=PEER_WHOLE)

    gaps = [Reading(values=tuple(map(_p99_gap_ms, arm.loops))) for arm in (own, its)]
    return [
        row("output tokens/s, all at once", "tokens/s", [arm.throughput for arm in (own, its)]),
        row("TTFT, median", "ms", _both(own, its, lambda one: one.ttft_s)),
        row("TPOT, median", "ms", _both(own, its, lambda one: one.tpot_s)),
        row("gap between tokens, p99", "ms", gaps),
    ]


def _p99_gap_ms(loop: tuple[float, list[Sent]]) -> float:
    gaps = sorted(gap for one in loop[1] for gap in one.gaps_s)
    return 1000 * gaps[int(0.99 * (len(gaps) - 1))]


def _both(own: Arm, its: Arm, pick: Callable[[Sent], float]) -> list[Reading]:
    return [arm.median(pick) for arm in (own, its)]


def _gap_rows(own: Arm, its: Arm) -> list[Row]:
    method = f"{MODEL}, one core each, a prompt of 2,048 alone"
    gaps = [
        Reading(values=tuple(1000 * _first_gap_s(one) for one in arm.long)) for arm in (own, its)
    ]
    second = [
        Reading(values=tuple(1000 * (one.token_s[1] - _prefilled_s(one)) for one in arm.long))
        for arm in (own, its)
    ]
    first = [Reading(values=tuple(1000 * one.ttft_s for one in arm.long)) for arm in (own, its)]
    return [
        _row("gap between token 1 and 2, alone", "ms", gaps, method, goal=1.0),
        _row("from the end of prefill to token 2, alone", "ms", second, method, goal=1.0),
        _row("TTFT, alone", "ms", first, method),
    ]


def _first_gap_s(one: Sent) -> float:
    return one.gaps_s[0]


def _prefilled_s(one: Sent) -> float:
    """When the prefill side had its token: ours delivers it, vLLM's decode server says it again."""
    return one.ledger_ms[PREFILLED] / 1000 if PREFILLED in one.ledger_ms else one.ttft_s


def _row(name: str, unit: str, found: list[Reading], method: str, goal: float | None = None) -> Row:
    against = "vLLM over its NIXL connector"
    return _compared(f"{name}, {OUR_SPLIT}", unit, found, method, against=against, goal=goal)


def _compared(
    name: str,
    unit: str,
    found: list[Reading],
    method: str,
    *,
    against: str,
    goal: float | None = None,
) -> Row:
    own, its = found
    return Row(
        name=name,
        value=own.median,
        unit=unit,
        against=against,
        against_value=its.median,
        goal=goal,
        lower_is_better=unit == "ms",
        method=method,
        spread=f"{own.spread()}; peer {its.spread()}",
    )
