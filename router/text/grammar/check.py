"""Asks a process of its own whether a grammar can be used, and remembers the answers.

The process starts with the first grammar, which waits for it; with a vocabulary of 128,000 tokens
that takes a second or two. If a grammar ends it, the grammar is refused and the next one starts it
again. Runs in the router's event loop.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from weakref import WeakValueDictionary

from kvpool.core.layout.hashes import tenant_label
from kvrelay.errors import InvalidRequest
from router.text.grammar.grammars import bounded

REMEMBERED = 1024
PATIENCE_S = 30.0
"""For a process that doesn't answer, though its own timer should have ended it."""
MOST_TOLD = 2000
"""Characters of an error: llguidance quotes the grammar."""

TOO_LONG = "it takes too long to compile: make it smaller, or bound its repetitions"
NO_TOKENIZER = "this model's tokenizer can't be used for it"
TOO_DEEP = "its rules refer to each other too deeply, or it takes too much memory: make it smaller"
_REASONS = {-signal.SIGPROF: TOO_LONG, -signal.SIGKILL: TOO_LONG, 1: NO_TOKENIZER}


class GrammarCheck:
    """One grammar at a time, and tenants in turn, so one tenant's many new grammars delay another's
    by one check at most. `tokenizer` is the path of the model's tokenizer.json."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._process: Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant
        self._known: OrderedDict[str, str] = OrderedDict()

    async def check(self, grammar: str, tenant: str = "") -> None:
        """Raises InvalidRequest with llguidance's words if it can't be used."""
        bounded(grammar, "grammar")
        error = self._known.get(grammar)
        if error is None:
            of_tenant = self._turns.setdefault(tenant_label(tenant), asyncio.Lock())
            async with of_tenant, self._turn:
                error = self._known.get(grammar)
                if error is None:
                    error = await self._asked(grammar)
                    self._remember(grammar, error)
        if error:
            told = f"the output can't be constrained: {error[:MOST_TOLD]}"
            raise InvalidRequest(told, code="invalid_grammar")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    def _remember(self, grammar: str, error: str) -> None:
        self._known[grammar] = error
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    async def _asked(self, grammar: str) -> str:
        if self._process is None or self._process.poll() is not None:
            await self.close()
            self._process = self._start()
        process = self._process
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await asyncio.to_thread(_ask, process, grammar)
        except TimeoutError:
            line = b""
        except BaseException:  # nobody will read the answer
            await self.close()
            raise
        if line:
            return str(json.loads(line))
        await self.close()
        return _REASONS.get(process.returncode, TOO_DEEP)

    def _start(self) -> Popen[bytes]:
        """Not by the event loop: a start by uvloop's sometimes has its pipe closed at once."""
        command = [sys.executable, "-m", "router.text.grammar.checker", str(self._tokenizer)]
        return Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


def _ask(process: Popen[bytes], grammar: str) -> bytes:
    """A line, or nothing if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(grammar).encode() + b"\n")
        process.stdin.flush()
        return process.stdout.readline()
    except (OSError, ValueError):  # it has ended, or is closed
        return b""


def _end(process: Popen[bytes]) -> None:
    """It ends with its standard input, unless it computes."""
    with suppress(OSError), process:
        process.kill()
