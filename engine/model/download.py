"""Reports the progress of a download from the Hugging Face hub, from the progress bars of the hub's
client. Nothing is drawn."""

from __future__ import annotations

import threading
from typing import Any

from tqdm import tqdm

from engine.core.activity import ReportActivity, Stage, StartActivity


class _Nowhere:
    """The output of bars that are not drawn."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def bars_for(report: ReportActivity) -> type[tqdm]:
    """A class of progress bars for `snapshot_download(tqdm_class=...)`. Of the bars that count
    bytes the most advanced one is reported; bars that count files are ignored."""
    furthest = StartActivity(stage=Stage.DOWNLOADS)
    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **(options | {"file": _Nowhere(), "disable": False}))

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            self._report()
            return drawn

        def _report(self) -> None:
            nonlocal furthest
            if not self._counts_bytes:
                return
            with lock:
                furthest = StartActivity(
                    stage=Stage.DOWNLOADS,
                    done_bytes=max(furthest.done_bytes, int(self.n)),
                    total_bytes=max(furthest.total_bytes, int(self.total or 0)),
                )
            report(furthest)

    Bar.set_lock(threading.RLock())
    return Bar
