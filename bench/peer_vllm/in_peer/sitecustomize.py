"""On the path of vLLM's processes: NIXL's progress thread sleeps while there is nothing to do.

NIXL's Python class fixes that thread's delay at 0, so it takes a whole core, also from a model that
computes on the same core. A thread that sleeps still wakes at once for a transfer.
"""

from __future__ import annotations

_DELAY_US = 100_000

try:
    from nixl_cu12 import _bindings
except ImportError:
    pass  # a process without NIXL
else:

    class _SleepingConfig(_bindings.nixlAgentConfig):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _DELAY_US if name == "pthrDelay" else value)

    _bindings.nixlAgentConfig = _SleepingConfig
