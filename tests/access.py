"""The token of all clusters that tests start, by commands or by hand."""

from __future__ import annotations

from pathlib import Path

from cluster.access.chosen import TOKEN_KEY
from cluster.access.files import read_or_make
from kvrelay.access.values import AUTHORIZATION, Access, bearer
from tests.environment import TOKEN_FILE

TOKEN = read_or_make(Path(TOKEN_FILE), TOKEN_KEY)
ACCESS = Access(token=TOKEN)
HEADERS = {AUTHORIZATION: bearer(TOKEN)}
OTHER_TOKEN = bytes(range(32))


def token_file(folder: Path, token: bytes = OTHER_TOKEN) -> str:
    """For --token-file."""
    path = folder / f"{token.hex()[:8]}.token"
    path.write_text(token.hex())
    path.chmod(0o600)
    return str(path)
