"""What is compiled now because it is used for the first time, as the compilers themselves say.

A step that compiles may take minutes, and does not hang.
"""

from __future__ import annotations

import sys
from typing import Any


class FirstUses:
    """Any thread may begin, end and ask."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._heard: set[str] = set()  # the compilers that report

    @property
    def now(self) -> str | None:
        """What is compiled now."""
        running = self._running[-1:]
        return running[0] if running else None

    def begin(self, what: str) -> None:
        self._running.append(what)

    def end(self) -> None:
        if self._running:
            self._running.pop()

    def listen(self) -> None:
        """To the compilers that this process has loaded, to each once."""
        compilers = {"torch._dynamo": self._listen_to_dynamo, "triton": self._listen_to_triton}
        for name in compilers.keys() - self._heard:
            if name in sys.modules:
                self._heard.add(name)
                compilers[name]()

    def _listen_to_dynamo(self) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(lambda _: self.begin("a graph of operations"))
        callback_handler.register_end_callback(lambda _: self.end())

    def _listen_to_triton(self) -> None:
        from triton import knobs

        if knobs.runtime.jit_cache_hook is None and knobs.runtime.jit_post_compile_hook is None:
            knobs.runtime.jit_cache_hook = self._triton_begins
            knobs.runtime.jit_post_compile_hook = self._triton_ends

    def _triton_begins(self, *, fn: Any, **_: object) -> bool:
        self.begin(f"the kernel {fn.name}")
        return False  # else it would not be compiled

    def _triton_ends(self, **_: object) -> bool:
        self.end()
        return False


FIRST_USES = FirstUses()
"""Of this process."""
