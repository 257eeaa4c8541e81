"""`kvrelay chat`: in a pipe, and in a terminal as a person uses it."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trustme

from kvrelay.errors import Refused
from tests.clients.recording import TEXT, recording
from tests.integration.faces_kit import Served, in_loop, served
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.integration.test_promises_brought_back import refusing
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

COMMAND = [sys.executable, "-m", "cluster", "chat"]
PATIENCE_S = 20.0


async def piped(
    url: str, prompt: str, *options: str, expected: int = 0, **env: str
) -> tuple[str, str]:
    """(stdout, stderr)"""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        f"--address={url}",
        *options,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | env,
    )
    out, err = (text.decode() for text in await process.communicate(prompt.encode()))
    assert process.returncode == expected, (out, err)
    return out, err


@in_loop
async def test_a_pipe_gets_the_answer_and_nothing_else(folder: Path) -> None:
    async with served(folder) as s:
        out, err = await piped(s.url, "the earth", "--system", "heaven", "--seed", "5")
        assert (out, err) == ("heaven\n", ""), "the fake says the prompt up to its first end"
        assert "heaven" in asked(s) and "the earth" in asked(s)
        assert s.dispatcher.requests[-1].sampling.seed == 5


@in_loop
async def test_a_model_without_a_chat_template_goes_on_with_the_text(tmp_path: Path) -> None:
    async with served(byte_level(tmp_path, chat_template=None)) as s:
        out, err = await piped(s.url, "the earth", "--max-tokens", "3")
        assert err == "kvrelay: this model has no chat template: text is continued, without turns\n"
        assert out.strip()


@in_loop
async def test_errors_are_one_line(folder: Path) -> None:
    async with served(folder) as s:
        _, err = await piped(s.url, "x", "--model", "other", expected=2)
        assert re.fullmatch(r"kvrelay: .*other.*\n", err)
        s.dispatcher.refusal = Refused("slots_exhausted", "all places are taken", retry_after_s=1.5)
        _, err = await piped(s.url, "x", expected=2)
        assert err == (
            "kvrelay: refused for now: all places are taken; come back in 1.5 s, or give --wait\n"
        )
    _, err = await piped("127.0.0.1:9", "x", expected=2)
    assert err.startswith("kvrelay: http://127.0.0.1:9: no server answers (")


@in_loop
async def test_with_wait_it_comes_back_with_its_promise(folder: Path) -> None:
    async with served(folder, refusing(2)) as s:
        out, _ = await piped(s.url, "the earth", "--wait")
        assert out.strip()
        promises = [request.promise for request in s.dispatcher.requests]
        assert [told is not None for told in promises] == [False, True, True]


@in_loop
async def test_over_tls_with_a_key(tmp_path: Path) -> None:
    """Both certificates are checked: the server's, and the user's own."""
    authority = trustme.CA()
    trusted, own = tmp_path / "ca.pem", tmp_path / "own.pem"
    authority.cert_pem.write_to_path(str(trusted))
    authority.issue_cert("user").private_key_and_cert_chain_pem.write_to_path(str(own))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    with recording(context) as server:
        options = ("--ca-file", str(trusted), "--cert", str(own))
        out, _ = await piped(server.url, "x", *options, KVRELAY_API_KEY="secret")
        assert (out, server.keys) == (f"{TEXT}\n", ["Bearer secret"])
        _, err = await piped(server.url, "x", expected=2)
        assert "no server answers (" in err and "--ca-file names the certificates to trust" in err
        _, err = await piped(server.url, "x", "--cert", str(trusted), expected=2)
        assert err.startswith(f"kvrelay: --cert {trusted}: can't be used: ")


# --- in a terminal --------------------------------------------------------------------------------


class Terminal:
    """A person at a terminal: types, and reads what is shown."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._seen = ""

    async def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def shows(self, what: str) -> str:
        """All that came up to it."""
        async with asyncio.timeout(PATIENCE_S):
            while what not in self._seen:
                self._seen += await asyncio.to_thread(self._read)
        before, _, self._seen = self._seen.partition(what)
        return before

    def _read(self) -> str:
        return os.read(self._descriptor, 4096).decode(errors="replace")

    async def interrupts(self, until: str) -> None:
        """Again and again: a signal that comes just before input() waits is seen with the next."""
        shown = asyncio.create_task(self.shows(until))
        while not shown.done():
            self._process.send_signal(signal.SIGINT)
            await asyncio.wait([shown], timeout=1.0)
        await shown

    async def ends(self) -> int:
        return await asyncio.wait_for(self._process.wait(), PATIENCE_S)


@asynccontextmanager
async def terminal(s: Served, *options: str) -> Any:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, f"--address={s.url}", *options, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


def asked(s: Served) -> str:
    """The last prompt, as the template wrote it."""
    return s.servers.service.tokenizer.decode(s.dispatcher.requests[-1].prompt_ids)


@in_loop
async def test_turns_are_remembered_until_reset(folder: Path) -> None:
    async with served(folder) as s, terminal(s, "--max-tokens=4") as person:
        await person.shows(f"tiny at {s.url}")
        await person.shows("> ")
        await person.type("first question\n")
        await person.shows("> ")
        await person.type("second\n")
        await person.shows("second\r\n")
        await person.shows("> ")
        assert "first question" in asked(s) and "second" in asked(s)
        await person.type("/reset\n")
        await person.shows("all is forgotten")
        await person.shows("> ")
        await person.type("third\n")
        await person.shows("third\r\n")
        await person.shows("> ")
        assert "first question" not in asked(s) and "third" in asked(s)
        await person.type("/nonsense\n")
        await person.shows("no command /nonsense: /help lists them")
        await person.type("/quit\n")
        assert await person.ends() == 0


@in_loop
async def test_ctrl_c_stops_the_answer_and_not_the_program(folder: Path) -> None:
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with served(folder, dispatcher) as s, terminal(s) as person:
        await person.shows("> ")
        await person.interrupts("Ctrl-D or /quit ends")
        await person.type("the earth\n")
        while not dispatcher.yielded_tokens:
            await asyncio.sleep(0.01)
        await person.interrupts("[stopped]")
        while dispatcher.running:
            await asyncio.sleep(0.01)
        await person.shows("> ")
        await person.type("\x04")
        assert await person.ends() == 0


@in_loop
async def test_a_refused_turn_is_asked_about_and_comes_back(folder: Path) -> None:
    async with served(folder, refusing(2)) as s, terminal(s) as person:
        await person.shows("> ")
        await person.type("the earth\n")
        await person.shows("refused for now: not now; there is room in 0.2 s")
        await person.shows("wait? [Y/n] ")
        await person.type("n\n")
        await person.shows("> ")
        await person.type("the earth\n")
        await person.shows("wait? [Y/n] ")
        await person.type("\n")
        await person.shows("the earth")
        await person.shows("> ")
        assert [one.promise is not None for one in s.dispatcher.requests] == [False, False, True]
        await person.type("\x04")
        assert await person.ends() == 0
