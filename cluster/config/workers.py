"""The `workers` section of a cluster file. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WrapSerializer,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from cluster.config.takes import Takes
from cluster.config.types import (
    AutoCount,
    AutoOrOff,
    AutoRole,
    Count,
    Device,
    DtypeName,
    Name,
    Quantity,
    Quantization,
    Section,
)
from kvrelay.types import Role

TAKEN_NAMES = ("router", "pool", "controller")
"""Other processes of a cluster are named so."""


def role_at(role: Role | None, number: int) -> Role:
    """Of the worker with this number in its pool. In one that takes either role, half of the
    workers begin with each."""
    return role or (Role.DECODE if number % 2 else Role.PREFILL)


class ParallelSection(Section):
    tensor: Count = 1
    """Number of processes on one machine that share one copy of the model. Each has some of its
    heads; on device cuda each has its own GPU."""
    pipeline: Count = 1
    """Number of stages, each with some of the layers, in processes of their own. A stage computes a
    chunk of a prompt while the next stage computes the chunk before. For prefill pools. With tensor
    too, each stage has that many processes; on device cuda each process has its own GPU."""

    @property
    def ranks(self) -> int:
        """Processes of one worker."""
        return self.tensor * self.pipeline

    @property
    def degree(self) -> str:
        """The keys that say how many ranks there are."""
        given = {"tensor": self.tensor, "pipeline": self.pipeline}
        return " x ".join(key for key, count in given.items() if count > 1) or "tensor"


class Replicas(Section):
    min: Count
    max: Count

    @model_validator(mode="after")
    def _is_range(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min: at most max, which is {self.max}")
        return self

    @property
    def is_fixed(self) -> bool:
        return self.min == self.max


def _range(given: object) -> object:
    if isinstance(given, bool | str | float) or (isinstance(given, int) and given < 1):
        raise ValueError("a number from 1, or {min: 2, max: 8}")
    return {"min": given, "max": given} if isinstance(given, int) else given


class _OrNumber:
    """The JSON schema allows a number beside the range."""

    @staticmethod
    def __get_pydantic_json_schema__(
        core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        return {"anyOf": [{"type": "integer", "minimum": 1}, handler(core)]}


def _number(value: Replicas, inner: SerializerFunctionWrapHandler) -> object:
    return value.min if value.is_fixed else inner(value)


class WorkerPool(Section):
    """Identical workers. A role may have several pools."""

    name: Name | None = None
    """Its workers are named NAME-0, NAME-1 and so on. null: the role, or worker for role auto; of
    several pools of one role the second is named prefill2 or decode2, and so on."""
    role: AutoRole
    """prefill, decode or both: that of each of its workers, until it is flipped by hand. auto: half
    of them begin with each, and the cluster changes them as the offered work asks."""
    replicas: Annotated[Replicas, BeforeValidator(_range), WrapSerializer(_number), _OrNumber] = (
        Replicas(min=1, max=1)
    )
    """A number, or {min: 2, max: 8}: so many at first, and later as many as the offered work asks
    for, within these bounds."""
    device: Device = "auto"
    """auto: a GPU, shared with other workers if there are few, else the CPU; cpu; cuda (a GPU that
    Ray picks) or cuda:N (that GPU of the machine)."""
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """Resources that Ray reserves for each worker: CPU, GPU, memory (bytes), or your own names."""
    accelerator_type: str | None = None
    """Only on nodes with this accelerator, in Ray's spelling, such as H100."""
    cpu_threads: AutoCount = None
    """Threads of one worker, over all its processes; auto: the workers share the CPUs."""
    cpu_pinning: AutoOrOff = "auto"
    """auto: a worker on device cpu gets one CPU for each thread, which no other worker of the host
    uses, if there are enough; off: the system places its threads."""
    parallel: ParallelSection = ParallelSection()
    dtype: DtypeName | None = None
    """null: model.dtype."""
    quantization: Quantization | None = None
    """null: model.quantization."""
    takes: Takes = Takes()
    """The prompts that its workers compute while other pools could take the others."""

    @property
    def label(self) -> str:
        """The pool's name."""
        return self.name or _named_by(self.role)

    @property
    def on_gpu(self) -> bool:
        """For a resolved pool: with device auto it has a GPU if Ray reserves one for it."""
        if self.device == "auto":
            return self.resources.get("GPU", 0.0) > 0
        return self.device != "cpu"

    @field_validator("name")
    @classmethod
    def _is_free(cls, given: str | None) -> str | None:
        if given in TAKEN_NAMES:
            raise ValueError(f"another name than {', '.join(TAKEN_NAMES)}")
        return given

    @field_validator("parallel")
    @classmethod
    def _on_its_device(cls, given: ParallelSection, others: ValidationInfo) -> ParallelSection:
        device = others.data.get("device", "auto")
        if given.ranks > 1 and ":" in device:
            raise ValueError(
                f"{given.degree}: 1 on device {device}: several ranks need cuda, or cpu"
            )
        return given

    @field_validator("parallel")
    @classmethod
    def _has_its_gpus(cls, given: ParallelSection, others: ValidationInfo) -> ParallelSection:
        gpus = others.data.get("resources", {}).get("GPU", given.ranks)
        if given.ranks > 1 and gpus != given.ranks and others.data.get("device") != "cpu":
            raise ValueError(f"{given.degree}: as many ranks as resources.GPU, which is {gpus:g}")
        return given

    @field_validator("parallel")
    @classmethod
    def _has_its_threads(cls, given: ParallelSection, others: ValidationInfo) -> ParallelSection:
        threads = others.data.get("cpu_threads")
        if threads is not None and threads % given.ranks:
            raise ValueError(f"{given.degree}: ranks that divide the {threads} cpu_threads")
        return given

    @field_validator("takes")
    @classmethod
    def _computes_prompts(cls, given: Takes, others: ValidationInfo) -> Takes:
        if given != Takes() and others.data.get("role") is Role.DECODE:
            raise ValueError("no rule for a pool of role decode: it gets prompts that are computed")
        return given


def with_names(pools: tuple[WorkerPool, ...]) -> tuple[WorkerPool, ...]:
    """The first pool of a role needs no name; further ones get the role and a number."""
    seen: Counter[Role | None] = Counter()
    named = []
    for pool in pools:
        seen[pool.role] += pool.name is None
        is_further = pool.name is None and seen[pool.role] > 1
        name = f"{_named_by(pool.role)}{seen[pool.role]}" if is_further else pool.name
        named.append(pool.model_copy(update={"name": name}) if is_further else pool)
    return tuple(named)


def _named_by(role: Role | None) -> str:
    return "worker" if role is None else role.value


def roles_of(pools: Iterable[WorkerPool]) -> Counter[Role]:
    """Those with which all their workers begin."""
    return Counter(
        role_at(pool.role, number) for pool in pools for number in range(pool.replicas.min)
    )
