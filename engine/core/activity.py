"""The activity of a starting process, as it reports it. Pure values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvrelay.starts import StartPhase


class Stage(StrEnum):
    WAITS = "waits for resources"
    STARTS = "starts"
    IMPORTS = "loads its libraries"
    CHOOSES = "chooses its device and transports"
    DOWNLOADS = "downloads the model"
    LOADS = "loads the model"
    COMPILES = "compiles"
    CHECKS = "checks the model's steps"
    RECORDS = "records CUDA graphs"
    TIMES = "times steps"


PHASE_OF = {
    Stage.WAITS: StartPhase.PLACE,
    Stage.STARTS: StartPhase.PLACE,
    Stage.IMPORTS: StartPhase.IMPORT,
    Stage.CHOOSES: StartPhase.CHOOSE,
    Stage.DOWNLOADS: StartPhase.FETCH,
    Stage.LOADS: StartPhase.LOAD,
    Stage.COMPILES: StartPhase.COMPILE,
    Stage.CHECKS: StartPhase.CHECK,
    Stage.RECORDS: StartPhase.RECORD,
    Stage.TIMES: StartPhase.TIME,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartActivity:
    """`total_bytes` is the size of a download, or 0 while it is not known."""

    stage: Stage
    done_bytes: int = 0
    total_bytes: int = 0

    def __str__(self) -> str:
        if not self.total_bytes:
            return self.stage.value
        part = self.done_bytes / self.total_bytes
        return (
            f"{self.stage}: {self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB "
            f"({part:.0%})"
        )


ReportActivity = Callable[[StartActivity], None]
"""Called by the working thread; must return at once."""


def unheard(_: StartActivity) -> None:
    """Ignores reports."""
