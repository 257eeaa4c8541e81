"""A cache that we fill is one that the hub's own client finds; nothing half-written is in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.core.checkpoint_files import CheckpointFile
from engine.model.checkpoint import open_checkpoint
from engine.model.hub_cache import HubCache, commit_of, needed_files
from kvrelay.errors import PeerError
from tests.hub import COMMIT, HUB_ID, contents_of, digest_of
from tests.models import random_checkpoint


def files_of(contents: dict[str, bytes]) -> tuple[CheckpointFile, ...]:
    return tuple(
        CheckpointFile(name=name, digest=digest_of(name, content), nbytes=len(content))
        for name, content in sorted(contents.items())
    )


def fill(cache: HubCache, contents: dict[str, bytes]) -> Path:
    for file in files_of(contents):
        arriving = cache.receive(file)
        arriving.write(contents[file.name][:10])
        arriving.write(contents[file.name][10:])
        arriving.keep()
        arriving.discard()
    return cache.link(COMMIT, files_of(contents))


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


CONTENTS = {"config.json": b"{}", "sub/empty.txt": b"", "model.safetensors": bytes(range(256))}


def test_the_hubs_client_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    cache = HubCache(HUB_ID, tmp_path)
    assert cache.find(None) is None
    folder = fill(cache, CONTENTS)
    assert cache.find(COMMIT) == folder
    assert cache.find(None) is None, "no revision has this commit yet"
    cache.put_ref(None, COMMIT)
    cache.put_ref("release/1", COMMIT)
    assert cache.find(None) == cache.find("main") == cache.find("release/1") == folder
    found = snapshot_download(HUB_ID, cache_dir=tmp_path, local_files_only=True)
    assert Path(found) == folder
    at = try_to_load_from_cache(HUB_ID, "sub/empty.txt", cache_dir=tmp_path)
    assert isinstance(at, str) and Path(at).read_bytes() == b""
    assert {name: (folder / name).read_bytes() for name in CONTENTS} == CONTENTS
    assert needed_files(folder) == files_of(CONTENTS)
    assert all(map(cache.has, files_of(CONTENTS)))
    assert fill(cache, CONTENTS) == folder, "again"


@pytest.mark.parametrize(
    ("name", "sent", "why"),
    [
        ("config.json", b"[]", "its digest is wrong"),
        ("model.safetensors", b"\0" * 256, "its digest is wrong"),
        ("model.safetensors", CONTENTS["model.safetensors"][:-1], "its digest is wrong"),
        ("model.safetensors", CONTENTS["model.safetensors"] + b"x", "is longer than 256 bytes"),
    ],
)
def test_what_is_damaged_is_gone(name: str, sent: bytes, why: str, tmp_path: Path) -> None:
    cache = HubCache(HUB_ID, tmp_path)
    file = next(file for file in files_of(CONTENTS) if file.name == name)
    arriving = cache.receive(file)

    def put() -> None:
        arriving.write(sent)
        arriving.keep()

    with pytest.raises(PeerError, match=why):
        put()
    assert not cache.has(file)
    arriving.discard()
    assert left(tmp_path) == []


def test_a_content_of_another_size_is_not_it(tmp_path: Path) -> None:
    cache = HubCache(HUB_ID, tmp_path)
    folder = fill(cache, CONTENTS)
    (folder / "config.json").resolve().write_bytes(b"")
    assert [cache.has(file) for file in files_of(CONTENTS)] == [False, True, True]


def test_files_without_digests_are_not_offered(tmp_path: Path) -> None:
    folder = fill(HubCache(HUB_ID, tmp_path), CONTENTS)
    (folder / "notes.md").write_text("no engine needs it")
    assert needed_files(folder) == files_of(CONTENTS)
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"generation_config.json has no digest"):
        needed_files(folder)
    os.remove(folder / "generation_config.json")
    (folder / "generation_config.json").symlink_to("../../blobs/W-etag-of-a-mirror")
    with pytest.raises(ValueError, match="has no digest"):
        needed_files(folder)
    os.remove(folder / "generation_config.json")
    (folder / "config.json").resolve().unlink()
    with pytest.raises(FileNotFoundError):
        needed_files(folder)


def test_a_snapshots_commit() -> None:
    at = Path("/cache/models--some-owner--some-model/snapshots") / COMMIT
    assert commit_of(at, HUB_ID) == COMMIT
    assert commit_of(at, "some-owner/other") is None
    assert commit_of(at.parent / "main", HUB_ID) is None
    assert commit_of(at / "sub", HUB_ID) is None
    assert commit_of(Path("/models/llama"), "/models/llama") is None
    assert commit_of(Path("x"), "x") is None


def test_others_are_asked_for_what_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with a router alone has only the text files."""
    root = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    whole = contents_of(random_checkpoint(tmp_path / "model"))
    texts = {name: content for name, content in whole.items() if name.endswith(".json")}
    folder = fill(HubCache(HUB_ID), texts)
    HubCache(HUB_ID).put_ref(None, COMMIT)
    asked: list[tuple[str, str | None]] = []

    def nobody(*about: str | None) -> None:
        asked.append(about)  # type: ignore[arg-type]

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(Exception, match=r"has no model.safetensors"):
        open_checkpoint(HUB_ID, from_peers=nobody)
    assert asked == [(HUB_ID, None)]
    fill(HubCache(HUB_ID), whole)
    assert open_checkpoint(HUB_ID, from_peers=nobody).path == folder
    assert asked == [(HUB_ID, None)]
