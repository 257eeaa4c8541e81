"""Which files of a checkpoint an engine needs, and what it takes from another worker. Pure.

The hub's cache names each file's content by a digest: SHA-256 for large files, git's SHA-1 for
others. So whoever gets a file can check it, and needs to trust no one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
ALL_PATTERNS = (*TEXT_PATTERNS, "*.safetensors")
SECOND_COPIES = "consolidated*"
"""Of the same weights, in another format."""
JUDGE_S = 1.0
"""A fetch is compared with the hub's speed from then on."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """`name`: within the snapshot. `digest`: the name of its content in the hub's cache."""

    name: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOffer:
    """What a worker has of a model: all files that an engine needs, of one commit.
    `hub_bytes_per_s`: how fast they came from the hub; None: not known."""

    commit: str
    files: tuple[CheckpointFile, ...]
    hub_bytes_per_s: float | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def is_needed(name: str) -> bool:
    """By its pattern, which may match in subfolders too, as the hub's client has it."""
    is_wanted = any(fnmatchcase(name, pattern) for pattern in ALL_PATTERNS)
    return is_wanted and not fnmatchcase(name, SECOND_COPIES)


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def is_digest(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


def flaw_in(offer: CheckpointOffer) -> str | None:
    """Why an offer is not taken: it could lead out of the cache, or can't be checked."""
    if not is_commit(offer.commit):
        return f"{offer.commit!r} is no commit"
    if not offer.files:
        return "it has no files"
    if len({file.name for file in offer.files}) < len(offer.files):
        return "it names a file twice"
    return next((flaw for file in offer.files if (flaw := _flaw_in(file))), None)


def _flaw_in(file: CheckpointFile) -> str | None:
    if not _stays_inside(file.name):
        return f"{file.name!r} is no name of a file in a checkpoint"
    if not is_needed(file.name):
        return f"{file.name!r} is no file that an engine needs"
    if not is_digest(file.digest):
        return f"{file.name!r} has no digest"
    return f"{file.name!r} has a negative size" if file.nbytes < 0 else None


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    is_plain = str(path) == name and "\0" not in name and "\\" not in name
    return is_plain and not path.is_absolute() and ".." not in path.parts


def is_slower(done_bytes: int, elapsed_s: float, hub_bytes_per_s: float | None) -> bool:
    """Whether the hub has been seen to be faster than this fetch."""
    if hub_bytes_per_s is None or elapsed_s < JUDGE_S:
        return False
    return done_bytes < hub_bytes_per_s * elapsed_s
