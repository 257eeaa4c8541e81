"""Plays the pool nodes that a worker's lookup asks, one question after the other."""

from __future__ import annotations

from kvpool.core.fetch.client_events import (
    OWN_NODE,
    BlocksFetched,
    ConnectNode,
    FetchBlocks,
    FromNode,
    NodeEvent,
    NodeOrder,
    PoolJoined,
    SendPool,
)
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.node.messages import (
    FetchDone,
    Fetched,
    FetchWanted,
    LookedUp,
    LookupWanted,
    PoolWelcome,
)
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation

TTL_S = 30.0


def joined(node: Incarnation = OWN_NODE, life: str = "1") -> PoolJoined:
    welcome = PoolWelcome(
        wire_version=1,
        incarnation=node or Incarnation(f"own-{life}"),
        region=f"region-{life}",
        lease_ttl_s=TTL_S,
    )
    return PoolJoined(node=node, welcome=welcome)


class PlayedNodes:
    """The node of this host is there from the start. `connected`: the last link to another one."""

    def __init__(self, lookup: PrefixLookup) -> None:
        self.lookup = lookup
        self.connected: ConnectNode | None = None
        self._node, self._number = OWN_NODE, 0
        self.tell(joined())

    def tell(self, event: NodeEvent, now_s: float = 0.0) -> list[Restored]:
        ended = self.lookup.on_node(event, now_s)
        self.lookup.validate()
        return ended

    def orders(self) -> list[NodeOrder]:
        assert self.lookup.pool is not None
        return self.lookup.pool.take_commands()[0]

    def sought(self) -> LookupWanted:
        (order,) = self.orders()
        assert isinstance(order, SendPool) and isinstance(order.message, LookupWanted)
        self._node, self._number = order.node, order.message.request_no
        return order.message

    def wanted(self) -> tuple[Incarnation, FetchWanted]:
        """Which node is asked for what, over a link that is made if need be."""
        (order,) = self.orders()
        if isinstance(order, ConnectNode):
            self.connected = order
            self.tell(joined(order.node))
            (order,) = self.orders()
        assert isinstance(order, SendPool) and isinstance(order.message, FetchWanted)
        self._node, self._number = order.node, order.message.request_no
        return order.node, order.message

    def found(self, host: int, disk: int = 0, now_s: float = 1.0) -> list[Restored]:
        found = LookedUp(request_no=self._number, host_blocks=host, disk_blocks=disk)
        return self.tell(FromNode(message=found), now_s)

    def granted(self, blocks: int, now_s: float = 2.0) -> list[Restored]:
        places = tuple(map(PoolPlace, range(blocks)))
        granted = Fetched(request_no=self._number, places=places, checksums=(7,) * blocks)
        return self.tell(FromNode(node=self._node, message=granted), now_s)

    def copies(self) -> FetchBlocks:
        (order,) = self.orders()
        assert isinstance(order, FetchBlocks)
        assert (order.node, order.request_no) == (self._node, self._number)
        return order

    def copied(self, blocks: int, now_s: float = 2.0, **changes: object) -> list[Restored]:
        fields = {"region": "region-1", "sound_blocks": blocks} | changes
        done = BlocksFetched(node=self._node, request_no=self._number, **fields)  # type: ignore[arg-type]
        return self.tell(done, now_s)

    def fetched(self, blocks: int, now_s: float = 2.0) -> list[Restored]:
        """From the question to the end."""
        if not blocks:
            return self.granted(0, now_s)
        assert self.granted(blocks, now_s) == []
        self.copies()
        ended = self.copied(blocks, now_s)
        done = FetchDone(request_no=self._number)
        assert self.orders() == [SendPool(node=self._node, message=done)]
        return ended
