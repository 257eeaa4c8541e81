"""From which other worker a prefill worker could pull a prompt's first blocks. Pure.

The prefill worker decides whether that is worth it, and asks its host's pool node by itself. So
prefixes that are asked for at several workers end up at all of them, and in their pool nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.block_names import BlockNames
from kvrelay.messages import PrefixSource, WorkerHello
from kvrelay.types import Incarnation, RequestSpec
from router.directory import Directory
from router.placement import WorkerView


def prefix_source(
    directory: Directory,
    workers: Mapping[Incarnation, WorkerView],
    spec: RequestSpec,
    prefill: WorkerHello,
) -> PrefixSource | None:
    """The worker with most of the prompt, the least busy of several; None if `prefill` has as
    much itself."""
    names = BlockNames(
        fingerprint=prefill.fingerprint,
        physical_format=prefill.physical_format,
        rope_border_tokens=prefill.rope_border_tokens,
    )
    chain = names.chain(spec.tenant, len(spec.prompt_ids), prefill.block_size)
    held = directory.longest(chain.walk(spec.prompt_ids, len(spec.prompt_ids) - 1))
    own = held.get(prefill.incarnation, 0)
    others = [
        (blocks, -workers[holder].prefill_load, holder)
        for holder, blocks in held.items()
        if holder in workers and blocks > own
    ]
    if not others:
        return None
    blocks, _, peer = max(others)
    addresses = workers[peer].hello.transfer_addresses
    return PrefixSource(peer=peer, addresses=addresses, blocks=blocks)
