"""Who has a prompt's first blocks, and where a prefill worker could get them from. Pure.

The prefill worker decides whether pulling is worth it, and asks its host's pool node by itself. So
prefixes that are asked for at several workers end up at all of them, and in their pool nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvpool.block_names import BlockNames
from kvrelay.messages import PrefixSource, WorkerHello
from kvrelay.types import Incarnation, RequestSpec
from router.directory import Directory
from router.view import WorkerView

Format = tuple[str, str, int | None, int]
Workers = Mapping[Incarnation, WorkerView]
Held = Mapping[Incarnation, int]
"""# holder |-> how many of the prompt's first blocks it has"""


@dataclass(slots=True)
class HeldPrefixes:
    """Of one prompt. Workers of one format share its names, which are made once, and only if
    somebody asks."""

    spec: RequestSpec
    directory: Directory
    _found: dict[Format, Held] = field(default_factory=dict)
    _best: dict[Format, PrefixSource | None] = field(default_factory=dict)

    def blocks(self, hello: WorkerHello) -> Held:
        """By those whose blocks `hello`'s worker can use."""
        kind = _format(hello)
        if kind not in self._found:
            self._found[kind] = self._look(hello)
        return self._found[kind]

    def _look(self, hello: WorkerHello) -> Held:
        """At least the prompt's last token is computed, so it counts for nothing."""
        if not self.directory.entries:
            return {}
        names = BlockNames(
            fingerprint=hello.fingerprint,
            physical_format=hello.physical_format,
            rope_border_tokens=hello.rope_border_tokens,
        )
        prompt = self.spec.prompt_ids
        chain = names.chain(self.spec.tenant, len(prompt), hello.block_size)
        return self.directory.longest(chain.walk(prompt, len(prompt) - 1))

    def tokens(self, hello: WorkerHello) -> int:
        """What the worker has itself, or its host's pool node."""
        held = self.blocks(hello)
        if not held:
            return 0
        return max(held.get(hello.incarnation, 0), self._near(hello)) * hello.block_size

    def source(self, workers: Workers, prefill: WorkerHello) -> PrefixSource | None:
        """The worker, or pool node of another host, with most of the prompt: of several a worker,
        and of these the least busy. None if `prefill` has as much itself."""
        held = self.blocks(prefill)
        if not held:
            return None
        sources = [*self._worker(workers, prefill), *self._far(prefill)]
        best = max(sources, key=lambda source: source.blocks, default=None)
        own = held.get(prefill.incarnation, 0)
        return best if best is not None and best.blocks > own else None

    def _worker(self, workers: Workers, prefill: WorkerHello) -> Iterator[PrefixSource]:
        kind = _format(prefill)
        if kind not in self._best:
            self._best[kind] = _most(self.blocks(prefill), workers)
        if (best := self._best[kind]) is not None:
            yield best

    def _near(self, hello: WorkerHello) -> int:
        """What its host's pool node has."""
        reported = self.directory.is_reported
        near = (n for node, n in self._nodes(hello) if reported(node, hello.incarnation))
        return max(near, default=0)

    def _nodes(self, hello: WorkerHello) -> list[tuple[Incarnation, int]]:
        held = self.blocks(hello)
        return [(node, held[node]) for node in self.directory.pool_nodes if node in held]

    def _far(self, prefill: WorkerHello) -> Iterator[PrefixSource]:
        """Pool nodes that have more than the one of its own host."""
        near = self._near(prefill)
        for node, blocks in self._nodes(prefill):
            if blocks <= near:
                continue
            if addresses := self.directory.addresses(node):
                yield PrefixSource(peer=node, addresses=addresses, blocks=blocks, is_pool_node=True)


def _most(held: Held, workers: Workers) -> PrefixSource | None:
    holders = [
        (blocks, -workers[holder].prefill_load, holder)
        for holder, blocks in held.items()
        if holder in workers
    ]
    if not holders:
        return None
    blocks, _, peer = max(holders)
    return PrefixSource(peer=peer, addresses=workers[peer].hello.transfer_addresses, blocks=blocks)


def _format(hello: WorkerHello) -> Format:
    names = (hello.fingerprint, hello.physical_format, hello.rope_border_tokens)
    return (*names, hello.block_size)
