"""A prefill and a decode worker, and in place of a router whoever drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.core.worker.events import FromRouter, RouterJoined
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.messages import HandoffMode
from kvrelay.counters import Counters
from kvrelay.messages import Abort, BlockChanges, Prefill, ToWorker, WorkerEvent
from kvrelay.types import RequestSpec, Role
from tests.sim.model import LAYOUT, SLAB_BYTES
from tests.sim.peers import PeerNet
from tests.sim.worker import CHUNK_TOKENS, Shape, Worker


class Driven:
    """The stream over which both workers are driven. `heard` collects what they say."""

    def __init__(self) -> None:
        self.heard: list[WorkerEvent] = []
        self.on_events: Callable[[], None] = lambda: None

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None:
        self.heard += events
        self.on_events()


class Fabric(PeerNet):
    """`decode_block` is the decode worker's block size, where it isn't the layout's; `direct` lets
    pieces be read directly, one in two. The prefill worker has `stages`, and launches chunks of
    prompts ahead or not."""

    def __init__(
        self,
        seed: int,
        *,
        prefill_blocks: int,
        decode_blocks: int,
        slabs: int,
        slab_bytes: int = SLAB_BYTES,
        layout: KvLayout = LAYOUT,
        decode_block: int | None = None,
        direct: bool = False,
        mode: HandoffMode = HandoffMode.PUSH,
        prompt_steps: int = 1,
        stages: int = 1,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__(seed, measures=direct)
        self.stream = Driven()
        ours = Shape(
            role=Role.PREFILL,
            blocks=prefill_blocks,
            slabs=slabs,
            slab_bytes=slab_bytes,
            layout=layout,
            mode=mode,
            prompt_steps=prompt_steps,
            stages=stages,
            chunk_tokens=chunk_tokens,
        )
        theirs = replace(
            ours,
            role=Role.DECODE,
            blocks=decode_blocks,
            prompt_steps=1,
            stages=1,
            layout=replace(layout, block_size=decode_block or layout.block_size),
        )
        self.p, self.d = self.add_worker("p", 0, ours), self.add_worker("d", 0, theirs)
        for worker in (self.p, self.d):
            worker.post(RouterJoined(self.stream))

    @property
    def events(self) -> list[WorkerEvent]:
        return self.stream.heard

    @property
    def moved_bytes(self) -> int:
        return self.p.mover.moved_bytes + self.d.mover.moved_bytes

    def silence_prefill(self) -> None:
        """From now on the prefill worker does nothing and says nothing, without being gone."""
        self.stop(self.p.incarnation)

    def lose_each_other(self) -> None:
        self.cut(self.p.incarnation, self.d.incarnation)

    def to_decode(self, message: ToWorker) -> None:
        self.d.post(FromRouter(self.stream, message))

    def abort(self, spec: RequestSpec) -> None:
        self._say(self.p, Abort(key=spec.key), 0.01)
        self._say(self.d, Abort(key=spec.key), 0.2)

    def prefill_request(self, spec: RequestSpec, held_tokens: int = 0) -> None:
        message = Prefill(
            spec=spec,
            target_addresses=("d",),
            target=self.d.incarnation,
            held_tokens=held_tokens,
            within_s=self.random.choice([None, 0.05, 1.0]),
        )
        self._say(self.p, message, 0.01)

    def _say(self, worker: Worker, message: ToWorker, scale_s: float) -> None:
        name, event = worker.incarnation, FromRouter(self.stream, message)
        self.by(name, f"router>{name}", lambda: worker.post(event), scale_s)
