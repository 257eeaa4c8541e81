"""What reaches a worker's loop of its pool node, and of those of other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.fetch.client_events import (
    BlocksFetched,
    BlocksStored,
    FromNode,
    PoolJoined,
    PoolLost,
)
from kvrelay.types import Incarnation

NodeNews = PoolJoined | PoolLost | FromNode | BlocksStored | BlocksFetched


@dataclass(frozen=True, slots=True)
class FromFar:
    """What is heard of another host's node."""

    node: Incarnation
    news: NodeNews


PoolNews = NodeNews | FromFar
