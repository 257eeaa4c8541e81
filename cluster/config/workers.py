"""Worker pools as a cluster file has them. Pure."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.types import AutoCount, AutoOrOff, Count, Device, Dtype, Quantity, Section
from kvrelay.types import Role


class ParallelSection(Section):
    tensor: Count = 1
    """Processes of one machine that share one model copy, each with some of its heads; on device
    cuda each on a GPU of its own."""


class WorkerPool(Section):
    """Workers of one role that are alike. A role may have several pools."""

    role: Role
    replicas: Count = 1
    device: Device = "auto"
    """auto: a GPU, shared with other workers if there are few, else the CPU; cpu; cuda (a GPU that
    Ray picks) or cuda:N (that GPU of the machine)."""
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """What Ray sets aside for each worker: CPU, GPU, memory (bytes), or your own names."""
    accelerator_type: str | None = None
    """Only on nodes with this accelerator, in Ray's spelling, such as H100."""
    cpu_threads: AutoCount = None
    """Threads of one worker, of all its processes together; auto: the CPUs, shared out."""
    cpu_pinning: AutoOrOff = "auto"
    """auto: a worker on device cpu runs on as many CPUs as it has threads, which no other worker of
    the host uses, where there are enough; off: wherever the system puts it."""
    parallel: ParallelSection = ParallelSection()
    dtype: Dtype | None = None
    """null: as model.dtype says."""

    @property
    def on_gpu(self) -> bool:
        """Of a resolved pool: device auto has a GPU exactly where Ray sets one aside."""
        if self.device == "auto":
            return self.resources.get("GPU", 0.0) > 0
        return self.device != "cpu"

    @field_validator("parallel")
    @classmethod
    def _on_its_device(cls, given: ParallelSection, others: ValidationInfo) -> ParallelSection:
        device = others.data.get("device", "auto")
        if given.tensor > 1 and ":" in device:
            raise ValueError(f"tensor: 1 on device {device}: several ranks need cuda, or cpu")
        return given

    @field_validator("parallel")
    @classmethod
    def _has_its_gpus(cls, given: ParallelSection, others: ValidationInfo) -> ParallelSection:
        gpus = others.data.get("resources", {}).get("GPU", given.tensor)
        if given.tensor > 1 and gpus != given.tensor and others.data.get("device") != "cpu":
            raise ValueError(f"tensor: as many ranks as resources.GPU, which is {gpus:g}")
        return given

    @field_validator("parallel")
    @classmethod
    def _has_its_threads(cls, given: ParallelSection, others: ValidationInfo) -> ParallelSection:
        threads = others.data.get("cpu_threads")
        if threads is not None and threads % given.tensor:
            raise ValueError(f"tensor: a degree that divides the {threads} cpu_threads")
        return given
