"""How much code one request runs through: files, calls, calls from file to file.

The request is served by the simulator, that is by the cores of router, prefill worker and decode
worker, without HTTP, transport or model. Every call of a Python function of the product counts
while the request is there; what workers do when they start does not. Not counted are functions
that `dataclasses` generates, comprehensions (Python 3.12 inlines them) and the resumption of a
generator. The numbers are the same in every run of one Python version.

    python -m bench.router.trace_request           the numbers
    python -m bench.router.trace_request --path    which file calls which, in their order
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from bench.report import Row, print_table, write_json
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import TracePrompt, TraceRequest
from kvrelay.counters import Counters
from kvrelay.types import Sampling
from router.core.events import Admit, Deliver, Fail, Refuse, Submitted
from router.core.state.generation import GenerationRequest

REPOSITORY = Path(__file__).parents[2]
PRODUCT = ("proto", "kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster")
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
PROMPT_TOKENS = 1_000
OUTPUT_TOKENS = 4
MORE_TOKENS = 12
MOST_REQUESTS = 3
PREEMPTED_AFTER_S = 0.08
SETTINGS = (
    "engine.block_size=16",
    "scheduler.prefill_chunk_tokens=2048",
    "simulation.blocks=400",
    "simulation.slo={told: false}",
    "simulation.most_steps=1",
    "simulation.profile={kind: linear, prefill_overhead_s: 0.01, prefill_token_s: 2.0e-5,"
    " prefill_pair_s: 0.0, decode_knots: [[1, 0.01], [256, 0.01]], decode_kv_token_s: 0.0}",
    "workers=[{role: prefill, device: cuda}, {role: decode, device: cuda}]",
)
TIERS = (
    "scheduler.max_running_requests=2",
    "qos={tiers: {premium: {priority: 0, share: 0.5}, free: {priority: 1, default: true}}}",
)


@dataclass(slots=True)
class Calls:
    """What `recorded` has seen. `edges`: # (calling file, called file) |-> calls."""

    functions: Counter[CodeType] = field(default_factory=Counter)
    edges: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def files(self) -> list[str]:
        """In the order in which they are entered first."""
        return list(dict.fromkeys(called for _, called in self.edges))


@contextmanager
def recorded(calls: Calls) -> Iterator[None]:
    """Of this thread."""
    files: dict[CodeType, str | None] = {}

    def file_of(code: CodeType) -> str | None:
        if code not in files:
            files[code] = product_file(code)
        return files[code]

    def caller_of(frame: FrameType) -> str:
        outer = frame.f_back
        while outer is not None and file_of(outer.f_code) is None:
            outer = outer.f_back
        return "" if outer is None else file_of(outer.f_code) or ""

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (called := file_of(frame.f_code)) is None or is_resumed(frame):
            return
        calls.functions[frame.f_code] += 1
        calls.edges[caller_of(frame), called] += 1

    gc.disable()  # a collection calls the product's own callback
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def product_file(code: CodeType) -> str | None:
    """Relative to the repository; None: its calls don't count."""
    path = Path(code.co_filename)
    if code.co_name in INLINED or not path.is_relative_to(REPOSITORY):
        return None
    inner = path.relative_to(REPOSITORY)
    return str(inner) if inner.parts[0] in PRODUCT else None


def is_resumed(frame: FrameType) -> bool:
    """A generator that goes on behind a `yield`: RESUME has an operand then, at the start 0."""
    return frame.f_code.co_code[frame.f_lasti + 1] & 3 != 0


class Stage:
    """A simulated cluster of one prefill and one decode worker, and its only client."""

    def __init__(self, output_tokens: int, *settings: str) -> None:
        config = load_config(None, map(Override.parse, (*SETTINGS, *settings)))
        shape = TraceRequest(arrival_s=0.0, input_tokens=PROMPT_TOKENS, output_tokens=output_tokens)
        self._output_tokens = output_tokens
        self._simulation = ClusterSimulation(config, [shape] * MOST_REQUESTS, Scale())
        self._clock = self._simulation.clock
        self._router = self._simulation.routers[0]
        self._router.serve(self)
        self.tokens: Counter[str] = Counter()
        self._clock.run()

    def hear(self, command: Admit | Refuse | Deliver | Fail) -> None:
        assert not isinstance(command, Refuse | Fail), command
        if isinstance(command, Deliver):
            self.tokens[command.request_id] += sum(len(one.token_ids) for one in command.tokens)

    def submit(self, number: int, *, choices: int = 1, tier: str = "", hash_id: int = 0) -> None:
        """Prompts of one `hash_id` begin alike."""
        shape = TraceRequest(
            arrival_s=0.0,
            input_tokens=PROMPT_TOKENS,
            output_tokens=self._output_tokens,
            hash_ids=(hash_id, 1_000 + number),
        )
        request = GenerationRequest(
            request_id=str(number),
            prompt_ids=TracePrompt(shape, number),
            sampling=Sampling(max_tokens=self._output_tokens, seed=number, n=choices),
            qos_tier=tier,
        )
        self._router.hear(Submitted(request=request))

    def submit_later(self, number: int, delay_s: float, *, tier: str) -> None:
        self._clock.after(delay_s, lambda _: self.submit(number, tier=tier, hash_id=number))

    def run(self) -> None:
        """Until nothing happens any more."""
        self._clock.run()

    def counters(self) -> list[Counters]:
        """Of every worker, as the router knows them."""
        return [view.counters for view in self._router.core.state.workers.values()]


def plain_request(output_tokens: int = OUTPUT_TOKENS) -> Calls:
    """One choice, nothing cached, no objectives, one tier."""

    def serve(calls: Calls) -> None:
        stage = Stage(output_tokens)
        with recorded(calls):
            stage.submit(0)
            stage.run()
        assert stage.tokens == {"0": output_tokens}

    return second(serve)


def hard_request() -> Calls:
    """Two choices; half the prompt is cached from an earlier request; a request of a higher tier
    comes while it decodes and preempts one of the choices. That one's calls count too."""
    return second(_serve_hard)


def _serve_hard(calls: Calls) -> None:
    stage = Stage(MORE_TOKENS, *TIERS)
    stage.submit(0, hash_id=7)
    stage.run()
    with recorded(calls):
        stage.submit(1, choices=2, hash_id=7)
        stage.submit_later(2, PREEMPTED_AFTER_S, tier="premium")
        stage.run()
    assert stage.tokens == {"0": MORE_TOKENS, "1": 2 * MORE_TOKENS, "2": MORE_TOKENS}
    assert sum(one.preemptions for one in stage.counters()) == 1
    assert sum(one.prefix_hit_tokens for one in stage.counters()) >= PROMPT_TOKENS // 2 - 16


def second(serve: Callable[[Calls], None]) -> Calls:
    """Of two equal runs: functions that remember their results have been called in the first."""
    serve(Calls())
    calls = Calls()
    serve(calls)
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """`across`: calls from file to file."""

    files: int
    calls: int
    across: int


def counts(calls: Calls) -> Counts:
    return Counts(
        files=len(calls.files),
        calls=calls.edges.total(),
        across=sum(count for (caller, called), count in calls.edges.items() if caller != called),
    )


GOAL = Counts(files=55, calls=4_000, across=1_800)
"""Of the plain request."""


def calls_per_token() -> float:
    """Of each further token of a sequence that decodes alone."""
    few, many = (plain_request(tokens).edges.total() for tokens in (OUTPUT_TOKENS, MORE_TOKENS))
    return (many - few) / (MORE_TOKENS - OUTPUT_TOKENS)


def rows(title: str, of: Counts, goal: Counts | None = None) -> list[Row]:
    named = {"files": "files", "calls": "calls", "across": "calls from file to file"}
    return [
        Row(
            name=f"{name}, {title}",
            value=getattr(of, key),
            unit=key,
            against="the goal" if goal else "",
            against_value=getattr(goal, key) if goal else None,
            goal=1.0 if goal else None,
            lower_is_better=True,
        )
        for key, name in named.items()
    ]


def print_path(calls: Calls) -> None:
    """Each file where it is entered first, with the files that it calls."""
    for file in calls.files:
        callers = [caller or "the simulator" for caller, called in calls.edges if called == file]
        inner = sum(code_file == file for code_file in map(product_file, calls.functions))
        print(f"{file}: {inner} functions, called from {callers[0]}")
        for (caller, called), count in calls.edges.items():
            if caller == file and called != file:
                print(f"    {count:5} -> {called}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--path", action="store_true", help="which file calls which")
    parser.add_argument("--hard", action="store_true", help="the path of the second request")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    if args.path:
        print_path(hard_request() if args.hard else plain_request())
        return
    found = [
        *rows("plain request", counts(plain_request()), GOAL),
        Row(name="calls per further token", value=calls_per_token(), unit="calls"),
        *rows("two choices, prefix hit, preemption", counts(hard_request())),
    ]
    print_table("One request", found)
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
