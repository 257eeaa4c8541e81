"""When this process began to start, for the ledger of its start."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster.process import FIRST_LINE_S
from kvrelay.starts import StartLedger, StartPhase

STARTTIME = 19
"""The place of `starttime` in /proc/self/stat, behind the command in brackets: proc_pid_stat(5)."""


def ledger_of_process() -> StartLedger:
    """It began with this process, which imports since its first line."""
    return _importing(min(_exec_s(), FIRST_LINE_S), FIRST_LINE_S)


def ledger_since(asked_at: float, raylet: int) -> StartLedger:
    """It began at this time of the wall clock, and imports since now. Its node is there since
    the process `raylet` is."""
    now_s = time.monotonic()
    node_s = min(now_s, _exec_s(raylet))
    return _importing(now_s - max(0.0, time.time() - asked_at), now_s, node_s)


def _importing(begun_s: float, since_s: float, node_s: float | None = None) -> StartLedger:
    ledger = StartLedger(begun_s, node_s)
    ledger.enter(StartPhase.IMPORT, since_s)
    return ledger


def _exec_s(process: int | str = "self") -> float:
    """On the monotonic clock, within a tick of the kernel: 10 ms."""
    told = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    ticks = int(told.rpartition(")")[2].split()[STARTTIME])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s
