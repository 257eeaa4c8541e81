"""Events from pool nodes of this and other hosts, for a worker's loop."""

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
class FromRemote:
    """An event from another host's pool node."""

    node: Incarnation
    news: NodeNews


PoolNews = NodeNews | FromRemote
