"""Progress bars of model downloads, on the terminal of `kvrelay serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from engine.core.activity import StartActivity


@dataclass(slots=True)
class DownloadBars:
    """The bars stay below other output and vanish with the last download. Nothing is drawn where
    the output is no terminal."""

    console: Console = field(default_factory=Console)
    _drawn: Progress | None = None
    _tasks: dict[str, TaskID] = field(default_factory=dict)

    def show(self, downloads: Mapping[str, StartActivity]) -> None:
        """`downloads`: # process |-> progress of its download"""
        if not downloads or not self.console.is_terminal:
            self.close()
            return
        drawn = self._drawn or self._open()
        for name in [name for name in self._tasks if name not in downloads]:
            drawn.remove_task(self._tasks.pop(name))
        for name, activity in downloads.items():
            task = self._tasks.get(name)
            if task is None:
                task = self._tasks[name] = drawn.add_task(f"{name} {activity.stage}", total=None)
            total = activity.total_bytes or None
            drawn.update(task, completed=activity.done_bytes, total=total)

    def close(self) -> None:
        if self._drawn is not None:
            self._drawn.stop()
        self._drawn, self._tasks = None, {}

    def _open(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._drawn = Progress(*columns, console=self.console, transient=True)
        self._drawn.start()
        return self._drawn
