"""The files of a cluster's token and key: made once, private, and refused when they aren't."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cluster.access import chosen
from cluster.access.files import key_path, read, read_or_make, replace, token_path
from cluster.cli.main import app
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config
from kvrelay.errors import ConfigError

KEY = "network.token_file"


def config(**network: str) -> Config:
    return load_config(None, [Override(("network", key), value) for key, value in network.items()])


def test_a_file_is_made_once_and_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "c.token"
    made = read_or_make(path, KEY)
    assert len(made) == 32
    assert path.read_text() == f"{made.hex()}\n", "as openssl rand -hex 32 writes it"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert read_or_make(path, KEY) == made
    assert os.listdir(path.parent) == ["c.token"], "and nothing is left beside it"


def test_those_who_make_it_at_the_same_time_agree(tmp_path: Path) -> None:
    path, found = tmp_path / "c.token", set()
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        found.add(read_or_make(path, KEY))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "c.token"
    read_or_make(path, KEY)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"{KEY}: others may read .* chmod 600 {path}"):
        read_or_make(path, KEY)


@pytest.mark.parametrize(
    ("owner", "mode", "is_taken"),
    [
        (1000, 0o600, True),
        (1000, 0o440, False),
        (0, 0o440, True),  # a Secret, as Kubernetes mounts it for a pod's group
        (0, 0o400, True),
        (0, 0o444, False),
        (0, 0o460, False),
        (1001, 0o600, False),
    ],
)
def test_whose_file_may_have_which_mode(
    owner: int, mode: int, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We are 1000."""
    path = tmp_path / "c.token"
    made = read_or_make(path, KEY)
    found = os.stat_result((0o100000 | mode, 1, 1, 1, owner, 1000, 65, 0, 0, 0))
    monkeypatch.setattr("cluster.access.files.os.fstat", lambda _: found)
    monkeypatch.setattr("cluster.access.files.os.geteuid", lambda: 1000)
    if is_taken:
        assert read(path, KEY) == made
    else:
        with pytest.raises(ConfigError, match=str(path)):
            read(path, KEY)


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "é"])
def test_what_is_no_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path}: expected 64 hex digits, as openssl rand -hex"):
        read_or_make(path, KEY)


def test_a_folder_that_cannot_be_written_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{KEY}: .*file/c.token"):
        read_or_make(tmp_path / "file" / "c.token", KEY)


def test_default_paths_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/there")
    assert token_path("c") == Path("/there/kvrelay/c.token")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", unset)
        monkeypatch.setenv("HOME", "/home/me")
        assert key_path("c") == Path("/home/me/.config/kvrelay/c.key")


def test_a_cluster_has_two_secrets_and_keeps_both(tmp_path: Path) -> None:
    named = config(token_file=str(tmp_path / "t"), key_file=str(tmp_path / "k"))
    first = chosen.secrets_of(named)
    assert first.token != first.key
    assert chosen.secrets_of(named) == first
    assert first.token.hex() not in repr(first) and repr(first.key) not in repr(first)
    assert chosen.caller_access(named).token == first.token


def test_a_caller_makes_no_token(tmp_path: Path) -> None:
    """It would be another one than the cluster's."""
    path = tmp_path / "t"
    with pytest.raises(ConfigError, match=f"no file {path}: give --token-file"):
        chosen.caller_access(config(token_file=str(path)))
    assert not path.exists()


def test_rotating_tells_the_costs_and_makes_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.key"
    before = read_or_make(path, chosen.KEY_KEY)
    app(["rotate-key", "--key-file", str(path), "--yes"], standalone_mode=False)
    told = capsys.readouterr().out
    assert str(path) in told and "computed again" in told and "void" in told
    after = read(path, chosen.KEY_KEY)
    assert after not in (before, None)
    assert path.stat().st_mode & 0o777 == 0o600
    replace(path, chosen.KEY_KEY)
    assert read(path, chosen.KEY_KEY) not in (before, after)
