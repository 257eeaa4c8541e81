"""`kvrelay chat`: a conversation in the terminal, or one prompt from a pipe."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.for_users.server import (
    DEFAULT_ADDRESS,
    AddressOption,
    ApiKeyOption,
    CaFileOption,
    CertOption,
    server_at,
)
from kvrelay.errors import KvrelayError

if TYPE_CHECKING:
    from cluster.cli.for_users.conversation import Conversation, Piece, Refusal
    from cluster.cli.for_users.server import Problem

HELP = """\
/reset   forget what was said
/system TEXT   begin anew with this system message; without TEXT: with none
/help    this list
/quit    end, as Ctrl-D does
Ctrl-C   stop the answer"""
YOU, DIM, PLAIN = "\x1b[1m> \x1b[0m", "\x1b[2m", "\x1b[0m"
UNPRINTABLE = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")
"""What a model writes must not command the terminal."""


def chat(
    address: AddressOption = DEFAULT_ADDRESS,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Refuse to talk to any other model.")
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="The system message of the conversation.")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: the rest of the context.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: the likeliest token. Default: the model's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Default: the model's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same answer.")] = None,
    tier: Annotated[str | None, typer.Option(metavar="NAME", help="The QoS tier.")] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="When refused, come back at the promised time; don't ask."),
    ] = False,
    api_key: ApiKeyOption = None,
    ca_file: CaFileOption = None,
    cert: CertOption = None,
) -> None:
    """Talk to the model of a running cluster.

    In a terminal it is a conversation. In a pipe, standard input is one prompt, and standard output
    is the answer, nothing else: echo 'It was' | kvrelay chat.
    """
    from cluster.cli.for_users.conversation import Conversation

    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "tier": tier,
    }
    fields = {name: given for name, given in options.items() if given is not None}
    talk = Conversation(server_at(address, api_key, ca_file, cert), fields, system)
    with contextlib.closing(talk.client):
        if sys.stdin.isatty():
            Terminal(talk, waits=wait).run()
        else:
            _pipe(talk, waits=wait)


def _pipe(talk: Conversation, *, waits: bool) -> None:
    from cluster.cli.for_users.conversation import Refusal

    prompt = sys.stdin.read()
    last = ""
    while True:
        try:
            for piece in _answer(talk, prompt):
                if not piece.is_reasoning:
                    last = piece.text
                    print(last, end="", flush=True)
            break
        except Refusal as error:
            if last or not (waits and error.problem.is_refusal):
                raise KvrelayError(_advised(error)) from None
            due_s = time.monotonic() + (error.problem.retry_after_s or 0.0)
            _sleep_until_promised(talk, error.problem, due_s)
    if not last.endswith("\n"):
        print(flush=True)


def _answer(talk: Conversation, prompt: str) -> Generator[Piece, None, None]:
    """Of a model without a chat template: the prompt's continuation."""
    from cluster.cli.for_users.conversation import NO_TEMPLATE, Refusal

    try:
        yield from talk.ask(prompt)
    except Refusal as error:
        if error.problem.code != NO_TEMPLATE:
            raise
        talk.is_plain = True
        print(
            "kvrelay: this model has no chat template: text is continued, without turns",
            file=sys.stderr,
        )
        yield from talk.ask(prompt)


def _sleep_until_promised(talk: Conversation, problem: Problem, due_s: float) -> None:
    """The next request brings the promise back."""
    time.sleep(max(0.0, due_s - time.monotonic()))
    talk.promise = problem.promise or talk.promise


def _advised(error: Refusal) -> str:
    problem = error.problem
    if problem.is_about_the_key:
        return f"{problem.message}: --api-key or KVRELAY_API_KEY gives the key"
    if problem.is_refusal:
        return (
            f"refused for now: {problem.message}; come back in {_seconds(problem)}, or give --wait"
        )
    return problem.message


def _seconds(problem: Problem) -> str:
    after_s = problem.retry_after_s or 0.0
    return f"{after_s:.1f} s" if after_s < 10 else f"{math.ceil(after_s)} s"


class Terminal:
    """A person asks, line by line."""

    def __init__(self, talk: Conversation, *, waits: bool) -> None:
        self._talk = talk
        self._waits = waits

    def run(self) -> None:
        """Until /quit or Ctrl-D. Raises KvrelayError when there is no server at the start."""
        from cluster.cli.for_users.conversation import Refusal

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() its line editing and its history
        try:
            models = self._talk.models()
        except Refusal as error:
            raise KvrelayError(_advised(error)) from None
        print(f"{', '.join(models)} at {self._talk.server.url}; /help lists the commands")
        while (line := self._line()) is not None:
            if line.startswith("/"):
                if not self._obey(line):
                    return
            elif line.strip():
                self._turn(line)

    def _line(self) -> str | None:
        """None: the end."""
        while True:
            try:
                return input(YOU)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\nCtrl-D or /quit ends")

    def _obey(self, line: str) -> bool:
        """False: the end."""
        command, _, rest = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._talk.reset()
                print("all is forgotten")
            case "/system":
                self._talk.system = rest.strip()
                self._talk.reset()
                print("the conversation begins anew")
            case "/help":
                print(HELP)
            case _:
                print(f"no command {command}: /help lists them")
        return True

    def _turn(self, prompt: str) -> None:
        from cluster.cli.for_users.conversation import Refusal

        while True:
            try:
                self._show(prompt)
            except KeyboardInterrupt:
                print(f"{PLAIN}\n[stopped]")
            except Refusal as error:
                print(PLAIN, end="")
                if self._comes_back(error):
                    continue
            except KvrelayError as error:
                print(f"{PLAIN}{error}")
            return

    def _show(self, prompt: str) -> None:
        was_reasoning = False
        with contextlib.closing(_answer(self._talk, prompt)) as pieces:
            for piece in pieces:
                if piece.is_reasoning != was_reasoning:
                    print(DIM if piece.is_reasoning else f"{PLAIN}\n", end="")
                    was_reasoning = piece.is_reasoning
                print(piece.text.translate(UNPRINTABLE), end="", flush=True)
        print(PLAIN)

    def _comes_back(self, error: Refusal) -> bool:
        """After the wait that the refusal names, if it names one and the user wants it."""
        problem = error.problem
        if not problem.is_refusal:
            print(_hinted(problem))
            return False
        due_s = time.monotonic() + (problem.retry_after_s or 0.0)
        print(f"refused for now: {problem.message}; there is room in {_seconds(problem)}")
        try:
            if not self._waits and input("wait? [Y/n] ").strip().lower() in ("n", "no"):
                return False
            _sleep_until_promised(self._talk, problem, due_s)
        except (EOFError, KeyboardInterrupt):
            print()
            return False
        return True


def _hinted(problem: Problem) -> str:
    hint = " (/reset begins anew)" if problem.code == "context_length_exceeded" else ""
    return f"{problem.message}{hint}"
