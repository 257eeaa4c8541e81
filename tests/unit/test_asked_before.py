"""`kvrelay apply` shows what changes, and asks."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Callable, Iterator

import pytest
import typer

from cluster.cli.change import _confirmed
from kvrelay.errors import ConfigError

CHANGES = ("decode: 1 -> 2 workers",)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """At a terminal, which is stdin."""
    master, slave = pty.openpty()

    def write(text: str) -> None:
        assert os.write(master, text.encode()) == len(text)

    with open(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield write
    os.close(master)


@pytest.mark.parametrize("answer", ["y\n", "yes\n", "what?\ny\n"])
def test_whoever_says_yes_gets_it(
    typed: Callable[[str], None], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(answer)
    _confirmed(CHANGES, yes=False)
    assert capsys.readouterr().out.startswith("decode: 1 -> 2 workers\napply? [y/N]: ")


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04"])
def test_all_else_changes_nothing(typed: Callable[[str], None], answer: str) -> None:
    typed(answer)
    with pytest.raises(typer.Abort):
        _confirmed(CHANGES, yes=False)


def test_nobody_is_asked_about_nothing(
    typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    _confirmed((), yes=False)
    _confirmed(CHANGES, yes=True)
    assert capsys.readouterr().out == "nothing changes\ndecode: 1 -> 2 workers\n"


def test_where_nobody_can_answer_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        with pytest.raises(ConfigError, match="give --yes"):
            _confirmed(CHANGES, yes=False)
