"""Files that become code are taken only from folders and files that nobody else can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.device import kept_files
from engine.device.kept_files import NotKept, checked, keep, own_folder


@pytest.fixture(name="kept")
def a_kept_file(tmp_path: Path) -> Path:
    path = own_folder(tmp_path / "cache") / "code.so"
    keep(path, b"whole")
    return path


def test_what_was_kept_is_read_again(kept: Path) -> None:
    assert checked(kept) == b"whole"
    assert [one.stat().st_mode & 0o777 for one in (kept.parent, kept)] == [0o700, 0o600]


def test_a_file_that_is_not_there_is_no_news(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotKept):
        checked(kept.with_name("other"))
    assert not caplog.text


def _changed(path: Path) -> None:
    path.write_bytes(b"evil")


def _writable(path: Path) -> None:
    path.chmod(0o620)


def _linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def _without_digest(path: Path) -> None:
    path.with_name("code.so.blake2b").write_bytes(b"")


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (_changed, "its content is not what was kept"),
        (_writable, "others can write it"),
        (_linked, "symbolic link"),
        (_without_digest, "its content is not what was kept"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_taken(
    kept: Path, caplog: pytest.LogCaptureFixture, tamper: object, why: str
) -> None:
    assert callable(tamper)
    tamper(kept)
    with pytest.raises(NotKept):
        checked(kept)
    (line,) = caplog.messages
    assert line.startswith(f"{kept} is not used, and made again")
    assert why in line


def test_another_users_file_is_not_taken(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    with pytest.raises(NotKept, match="it belongs to the user"):
        checked(kept)


def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_files._instead_of.cache_clear()
    monkeypatch.setattr(kept_files.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    instead = own_folder(folder)
    assert instead != folder
    assert instead.stat().st_mode & 0o777 == 0o700
    assert own_folder(folder) == instead, "one for each process"
    assert "is not used, because others can write it" in caplog.text


def _volume(tmp_path: Path) -> Path:
    """A volume's root as the kubelet makes it for an fsGroup: the group may write, and what is made
    there is the group's."""
    root = tmp_path / "volume"
    root.mkdir()
    root.chmod(0o2777)
    return root


def test_a_volume_of_a_pod_is_used(tmp_path: Path) -> None:
    folder = own_folder(_volume(tmp_path) / "kvrelay")
    keep(folder / "code.so", b"whole")
    assert folder.name == "kvrelay" and folder.stat().st_mode & 0o777 == 0o700
    assert checked(folder / "code.so") == b"whole"


def test_what_each_mount_lets_the_group_write_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kubelet does unless the pod says `fsGroupChangePolicy: OnRootMismatch`."""
    kept_files._instead_of.cache_clear()
    monkeypatch.setattr(kept_files.tempfile, "tempdir", str(tmp_path))
    folder = own_folder(_volume(tmp_path) / "kvrelay")
    keep(folder / "code.so", b"whole")
    folder.chmod(0o2770)
    (folder / "code.so").chmod(0o660)
    assert own_folder(folder) != folder
    with pytest.raises(NotKept, match="others can write it"):
        checked(folder / "code.so")
