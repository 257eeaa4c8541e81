"""What one copy of a model could serve of a workload, by arithmetic. Pure.

The bound of queueing theory without its queues: a server is busy for its mean service time per
request. Simulation then says what waiting costs.

The ways in which devices at hand can hold one copy of a model. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from statistics import fmean

from cluster.sim.profiles.capacity import PlannedModel, Unfit, capacity
from cluster.sim.profiles.roofline import Parallel, RooflineTimes, roofline_times
from cluster.sim.profiles.schema import BYTES_PER_PARAMETER, DeviceProfile, Efficiency
from cluster.sim.trace import TraceRequest
from engine.core.sizing import EngineLimits
from engine.core.step_times import decode_work, prefill_work
from kvrelay.errors import ConfigError

_NODE_DEVICES = 8
PIPELINE_CHUNK = 2048
"""Prefill tokens of a step of a pipeline: several chunks fill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`bytes_per_s` leave, and reach, its devices together."""

    device: str
    parallel: Parallel
    times: RooflineTimes
    kv_tokens: int
    price_per_hour: float
    bytes_per_s: float

    @property
    def name(self) -> str:
        stages = f" pp{self.parallel.pipeline}" if self.parallel.pipeline > 1 else ""
        return f"{self.device} tp{self.parallel.tensor}{stages}"

    def profile(self, model: str, facts: PlannedModel) -> dict[str, object]:
        """Its hardware profile, as a file would have it."""
        precision = facts.precision
        return {
            "kind": "roofline",
            "name": self.name,
            "device": self.device,
            "model": model,
            "weight_dtype": precision.weights,
            "expert_dtype": precision.experts,
            "kv_dtype": precision.kv,
            "tensor_parallel": self.parallel.tensor,
            "pipeline_parallel": self.parallel.pipeline,
            "price_per_hour": self.price_per_hour,
        }


def copies(
    facts: PlannedModel,
    devices: Mapping[str, DeviceProfile],
    stock: Mapping[str, int],
    longest_tokens: int,
    limits: EngineLimits,
) -> list[Copy]:
    """Those that hold a sequence of `longest_tokens`, and that a worker can start. Raises
    ConfigError: a price isn't known, or there are none."""
    found, why = list[Copy](), list[str]()
    for name, device in devices.items():
        for parallel in _degrees(facts, stock[name]):
            room = capacity(facts, name, device, parallel, longest_tokens, limits)
            if isinstance(room, Unfit):
                why.append(f"{name}, {room.why}")
            else:
                found.append(_copy(facts, name, device, parallel, room.kv_tokens))
    if not found:
        raise ConfigError(f"no device holds {facts.shape.name}: {why[-1]}")
    return found


def _degrees(facts: PlannedModel, most_devices: int) -> Iterator[Parallel]:
    most = min(most_devices, _NODE_DEVICES)
    for tensor, stages in product(facts.refusals.degrees, facts.refusals.stages):
        if tensor * stages <= most:
            yield Parallel(tensor=tensor, pipeline=stages)


def _copy(
    facts: PlannedModel, name: str, device: DeviceProfile, parallel: Parallel, kv_tokens: int
) -> Copy:
    if device.price_per_hour is None:
        raise ConfigError(f"{name}: its price isn't known, give it with --price {name}=NUMBER")
    times = roofline_times(
        device,
        facts.shape,
        precision=facts.precision,
        parallel=parallel,
        efficiency=Efficiency(),
        devices_per_node=_NODE_DEVICES,
    )
    return Copy(
        device=name,
        parallel=parallel,
        times=times,
        kv_tokens=kv_tokens,
        price_per_hour=parallel.devices * device.price_per_hour,
        bytes_per_s=parallel.devices * device.links.inter_node.bandwidth_bytes_per_s,
    )


def simulated_kv(facts: PlannedModel) -> dict[str, object]:
    """A layout of the same size, one head a layer, in 16 bits."""
    shape = facts.shape
    element_bytes = BYTES_PER_PARAMETER[facts.precision.kv]
    per_layer = shape.kv_elements_per_token * element_bytes / shape.layers
    dim = max(1, round(per_layer / (2 * 2)))
    return {"layers": shape.layers, "heads": 1, "head_dim": dim, "dtype": "float16"}


_SAMPLES = 64
_MOST_SEQUENCES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanObjectives:
    """`attainment` is the share of all offered requests that must meet both."""

    ttft_s: float
    tpot_s: float
    attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace in a few numbers; `prompts` is a sample of their lengths."""

    rate_per_s: float
    prompts: tuple[int, ...]
    mean_output: float
    longest: int

    @property
    def mean_context(self) -> float:
        return fmean(self.prompts) + self.mean_output / 2


def workload(requests: Sequence[TraceRequest], rate_scale: float) -> Workload:
    every = max(1, len(requests) // _SAMPLES)
    last_s = requests[-1].arrival_s or 1.0
    return Workload(
        rate_per_s=rate_scale * len(requests) / last_s,
        prompts=tuple(one.input_tokens for one in requests[::every]),
        mean_output=fmean(one.output_tokens for one in requests),
        longest=max(one.input_tokens + one.output_tokens for one in requests),
    )


def prefill_s(copy: Copy, work: Workload) -> float:
    """Until a prompt alone is computed, in the mean; nothing is found in caches. A pipeline of `S`
    stages takes `(n + S - 1) / nS` of the chunks' own time for `n` chunks of one length (GPipe,
    Huang et al. 2019): the rest is its bubble."""
    stages = copy.parallel.pipeline
    chunks = [ceil(tokens / PIPELINE_CHUNK) for tokens in work.prompts]
    filled = ((n + stages - 1) / (n * stages) for n in chunks)
    return fmean(part * own for part, own in zip(filled, _own_s(copy, work), strict=True))


def busy_s(copy: Copy, work: Workload) -> float:
    """How long a prompt keeps the copy from others, in the mean: in a full pipeline, one stage."""
    return fmean(_own_s(copy, work)) / copy.parallel.pipeline


def _own_s(copy: Copy, work: Workload) -> list[float]:
    """# prompt |-> its way through all stages"""
    return [copy.times.step_s(prefill_work(tokens)) for tokens in work.prompts]


def decode_s(copy: Copy, work: Workload, tpot_s: float) -> float | None:
    """Of a request, its share of the largest batch that fits and keeps `tpot_s`. None: even one
    sequence is slower than that."""
    fitting = int(copy.kv_tokens / work.mean_context)
    sequences = _largest_batch(copy, work, tpot_s, min(_MOST_SEQUENCES, fitting))
    if not sequences:
        return None
    return work.mean_output * _step_s(copy, work, sequences) / sequences


def _largest_batch(copy: Copy, work: Workload, tpot_s: float, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _step_s(copy, work, middle) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def _step_s(copy: Copy, work: Workload, sequences: int) -> float:
    return copy.times.step_s(decode_work(sequences, int(sequences * work.mean_context)))
