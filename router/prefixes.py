"""Which workers have a prompt's first blocks, and from which another one could pull them. Pure.

The prefill worker decides whether pulling is worth it, and asks its host's pool node by itself. So
prefixes that are asked for at several workers end up at all of them, and in their pool nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.block_names import BlockNames
from kvrelay.messages import PrefixSource, WorkerHello
from kvrelay.types import Incarnation, RequestSpec
from router.directory import Directory
from router.view import WorkerView

Format = tuple[str, str, int | None, int]


@dataclass(slots=True)
class HeldPrefixes:
    """Of one prompt. Workers of one format share its names, which are made once, and only if
    somebody asks."""

    spec: RequestSpec
    directory: Directory
    _found: dict[Format, Mapping[Incarnation, int]] = field(default_factory=dict)
    _sources: dict[Format, PrefixSource | None] = field(default_factory=dict)

    def blocks(self, hello: WorkerHello) -> Mapping[Incarnation, int]:
        """# holder of blocks that `hello`'s worker can use |-> how many of the first ones"""
        kind = _format(hello)
        if kind not in self._found:
            self._found[kind] = self._look(hello)
        return self._found[kind]

    def _look(self, hello: WorkerHello) -> Mapping[Incarnation, int]:
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
        """What the worker has itself."""
        return self.blocks(hello).get(hello.incarnation, 0) * hello.block_size

    def source(
        self, workers: Mapping[Incarnation, WorkerView], prefill: WorkerHello
    ) -> PrefixSource | None:
        """The worker with most of the prompt, the least busy of several; None if `prefill` has as
        much itself."""
        best = self._best(workers, prefill)
        own = self.blocks(prefill).get(prefill.incarnation, 0)
        return best if best is not None and best.blocks > own else None

    def _best(
        self, workers: Mapping[Incarnation, WorkerView], hello: WorkerHello
    ) -> PrefixSource | None:
        kind = _format(hello)
        if kind not in self._sources:
            self._sources[kind] = _most(self.blocks(hello), workers)
        return self._sources[kind]


def _most(
    held: Mapping[Incarnation, int], workers: Mapping[Incarnation, WorkerView]
) -> PrefixSource | None:
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
