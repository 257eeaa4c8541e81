"""Where else, besides its host's pool, a prefill worker could get a prompt's first blocks. Pure.

The prefill worker decides whether that is worth it, and asks its host's pool node by itself. So
prefixes that are asked for at several workers end up at all of them, and in their pool nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvpool.block_names import BlockNames
from kvrelay.messages import PrefixSource, WorkerHello
from kvrelay.types import Incarnation, RequestSpec
from router.directory import Directory
from router.placement import WorkerView

Held = Mapping[Incarnation, int]
"""# holder |-> how many of the prompt's first blocks it has"""


def prefix_source(
    directory: Directory,
    workers: Mapping[Incarnation, WorkerView],
    spec: RequestSpec,
    prefill: WorkerHello,
) -> PrefixSource | None:
    """The worker, or pool node of another host, with most of the prompt: of several a worker, and
    of these the least busy. None if `prefill` has as much itself."""
    names = BlockNames(
        fingerprint=prefill.fingerprint,
        physical_format=prefill.physical_format,
        rope_border_tokens=prefill.rope_border_tokens,
    )
    chain = names.chain(spec.tenant, len(spec.prompt_ids), prefill.block_size)
    held = directory.longest(chain.walk(spec.prompt_ids, len(spec.prompt_ids) - 1))
    at_workers = {holder: blocks for holder, blocks in held.items() if holder in workers}
    own = at_workers.pop(prefill.incarnation, 0)
    in_pools = {holder: blocks for holder, blocks in held.items() if holder not in workers}
    sources = [*_workers(at_workers, workers), *_nodes(in_pools, directory, prefill.incarnation)]
    _, _, best = max(sources, key=lambda source: source[:2], default=(0, 0.0, None))
    return best if best is not None and best.blocks > own else None


Ranked = tuple[int, float, PrefixSource]
"""blocks, what decides among as many: the most is best"""


def _workers(held: Held, workers: Mapping[Incarnation, WorkerView]) -> Iterator[Ranked]:
    for peer, blocks in held.items():
        addresses = workers[peer].hello.transfer_addresses
        source = PrefixSource(peer=peer, addresses=addresses, blocks=blocks)
        yield blocks, 1 / (1 + workers[peer].prefill_load), source


def _nodes(held: Held, directory: Directory, prefill: Incarnation) -> Iterator[Ranked]:
    """Those that have more than the node of its own host."""
    near = (blocks for node, blocks in held.items() if directory.is_reported(node, prefill))
    most_near = max(near, default=0)
    for node, blocks in held.items():
        addresses = directory.addresses(node)
        if addresses and blocks > most_near:
            source = PrefixSource(peer=node, addresses=addresses, blocks=blocks, is_pool_node=True)
            yield blocks, 0.0, source
