"""The process in which a router tries clients' grammars: `python -m router.text.grammar.checker
TOKENIZER_JSON`.

llguidance follows a grammar's rules by recursion, without a bound, and compiles for as long as it
takes. So a grammar of a few kilobytes can overflow a stack, or take minutes. Here it ends this
process alone: a stack is small, and a timer of processor time ends the process by SIGPROF.

Reads a JSON string in each line of standard input, a grammar, and answers each with a line: a JSON
string, which is empty where the grammar can be used. Ends with its standard input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Iterable

from llguidance import LLMatcher, LLTokenizer

COMPILE_S = 0.5
"""Processor time for one grammar. A worker compiles it too, and a step may have to wait for it."""
STACK_BYTES = 1 << 20
"""Workers have twice as much wherever they follow a grammar, so what fits here fits there."""
MOST_BYTES = 4 << 30
"""Of address space."""


def error_of(tokenizer: LLTokenizer, grammar: str) -> str:
    """llguidance's words on why it can't be used; empty where it can."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error().split("\n<state>", 1)[0].strip() if matcher.is_error() else ""


def _answer_all(tokenizer: LLTokenizer, lines: Iterable[str]) -> None:
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        found = error_of(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(found), flush=True)


def main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with open(path, encoding="utf-8") as file:
        tokenizer = LLTokenizer(file.read())
    threading.stack_size(STACK_BYTES)
    answers = threading.Thread(target=_answer_all, args=(tokenizer, sys.stdin))
    answers.start()
    answers.join()


if __name__ == "__main__":
    main(sys.argv[1])
