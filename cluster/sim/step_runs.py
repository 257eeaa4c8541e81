"""How long decode steps in a row take, and how many fit. Pure.

Each step adds a token to each context. Step times that are quadratic in the context, as fitted
ones are, are summed from three of them, exact but for half a token of context.
"""

from __future__ import annotations

from engine.latency import StepTimes, decode_work


def run_s(times: StepTimes, sequences: int, kv_tokens: int, steps: int) -> float:
    """Of `steps` steps, the first over `kv_tokens` of context in all."""
    first = times.step_s(decode_work(sequences, kv_tokens))
    if steps == 1:
        return first
    last = times.step_s(decode_work(sequences, kv_tokens + sequences * (steps - 1)))
    if steps == 2:
        return first + last
    middle = times.step_s(decode_work(sequences, kv_tokens + sequences * (steps - 1) // 2))
    bend = first - 2 * middle + last
    return steps * (middle + bend * (steps + 1) / (6 * (steps - 1)))


def steps_begun(
    times: StepTimes, sequences: int, kv_tokens: int, most: int, elapsed_s: float
) -> int:
    """How many of `most` steps have begun by then: the last of these is the one that runs."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if run_s(times, sequences, kv_tokens, middle) >= elapsed_s:
            high = middle
        else:
            low = middle + 1
    return low
