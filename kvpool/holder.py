"""Who holds blocks of a worker's device tier, and what it holds. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.blocks import BlockState
from kvpool.layout import Tables
from kvrelay.types import RequestKey


class Holder(NamedTuple):
    """One choice of one request's try, on one side of the worker ("prefill" or "decode")."""

    side: str
    key: RequestKey
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.side} {self.key}/{self.choice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTables:
    """`tables` without the blocks that are not held."""

    holder: Holder
    state: BlockState
    tables: Tables
    since_s: float
