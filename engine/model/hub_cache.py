"""The Hugging Face hub's cache of one model on this host, in the layout of the hub's own client:

    models--OWNER--NAME/blobs/DIGEST              contents
    models--OWNER--NAME/snapshots/COMMIT/FILE     symlinks to them
    models--OWNER--NAME/refs/REVISION             its commit

A content gets its name only once it is complete and its digest is right. A snapshot is linked once
all of its files are here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from engine.core.checkpoint_files import CheckpointFile, is_commit, is_digest, is_needed
from kvrelay.errors import PeerError

MAIN = "main"


class HubCache:
    """Of one model. Nothing is made before it is written to."""

    def __init__(self, hub_id: str, root: Path | None = None) -> None:
        """`root`: of the cache; None: that of the hub's client."""
        if root is None:
            from huggingface_hub.constants import HF_HUB_CACHE

            root = Path(HF_HUB_CACHE)
        folder = _folder_of(hub_id)
        self._folder = root.expanduser() / folder
        self._locks = root.expanduser() / ".locks" / folder

    def snapshot(self, commit: str) -> Path:
        return self._folder / "snapshots" / commit

    def find(self, revision: str | None) -> Path | None:
        """The snapshot of a revision, complete or not."""
        commit = revision or MAIN
        with suppress(OSError, ValueError):
            commit = (self._folder / "refs" / commit).read_text(encoding="ascii")
        folder = self.snapshot(commit)
        return folder if is_commit(commit) and folder.is_dir() else None

    def has(self, file: CheckpointFile) -> bool:
        blob = self._blob(file.digest)
        return blob.is_file() and blob.stat().st_size == file.nbytes

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process of this host at a time: others wait, and find what it fetched."""
        self._locks.mkdir(parents=True, exist_ok=True)
        with (self._locks / "from-peers.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def receive(self, file: CheckpointFile) -> ArrivingFile:
        blob = self._blob(file.digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        return ArrivingFile(file, blob)

    def link(self, commit: str, files: Iterable[CheckpointFile]) -> Path:
        """The snapshot's folder, once the contents of all its files are here."""
        folder = self.snapshot(commit)
        for file in files:
            pointer = folder / file.name
            pointer.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(self._blob(file.digest), pointer.parent)
            with suppress(FileExistsError):
                pointer.symlink_to(target)
        return folder

    def put_ref(self, revision: str | None, commit: str) -> None:
        """So that the hub's client finds the commit without the hub."""
        name = revision or MAIN
        if name == commit:
            return
        ref = self._folder / "refs" / name
        ref.parent.mkdir(parents=True, exist_ok=True)
        written = ref.with_name(f"{ref.name}.{uuid4().hex[:8]}.tmp")
        written.write_text(commit)
        written.replace(ref)

    def _blob(self, digest: str) -> Path:
        return self._folder / "blobs" / digest


def commit_of(folder: Path, hub_id: str) -> str | None:
    """None: the folder is no snapshot of this model in a hub's cache."""
    of_model, snapshots, commit = folder.parts[-3:] if len(folder.parts) > 2 else ("", "", "")
    is_snapshot = (of_model, snapshots) == (_folder_of(hub_id), "snapshots")
    return commit if is_snapshot and is_commit(commit) else None


def _folder_of(hub_id: str) -> str:
    return "--".join(["models", *hub_id.split("/")])


def needed_files(folder: Path) -> tuple[CheckpointFile, ...]:
    """Of a snapshot. Raises OSError when one is not there, and ValueError when its content is not
    named by its digest: then nobody could check it."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return tuple(_file_at(folder / name, name) for name in names if is_needed(name))


def _file_at(path: Path, name: str) -> CheckpointFile:
    digest = path.readlink().name if path.is_symlink() else ""
    if not is_digest(digest):
        raise ValueError(f"{name} has no digest in the hub's cache")
    return CheckpointFile(name=name, digest=digest, nbytes=path.stat().st_size)


class ArrivingFile:
    """A content on its way, under a temporary name, as the hub's client has it."""

    def __init__(self, file: CheckpointFile, blob: Path) -> None:
        self.file, self._blob = file, blob
        self._partial = blob.with_name(f"{blob.name}.{uuid4().hex[:8]}.incomplete")
        self._out = self._partial.open("xb", buffering=0)
        self._digest = _digest_for(file)
        self._left_bytes = file.nbytes

    def write(self, data: bytes) -> None:
        """Raises PeerError when it becomes longer than it is."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise PeerError(f"{self.file.name} is longer than {self.file.nbytes} bytes")
        self._digest.update(data)
        rest = memoryview(data)
        while rest:
            rest = rest[self._out.write(rest) :]

    @property
    def is_whole(self) -> bool:
        return not self._left_bytes

    def keep(self) -> None:
        """It is whole. Raises PeerError when it isn't what it should be."""
        self._out.close()
        if self._digest.hexdigest() != self.file.digest:
            raise PeerError(f"{self.file.name} is damaged: its digest is wrong")
        self._partial.replace(self._blob)

    def discard(self) -> None:
        """What was kept stays."""
        self._out.close()
        self._partial.unlink(missing_ok=True)


def _digest_for(file: CheckpointFile) -> hashlib._Hash:
    if len(file.digest) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
