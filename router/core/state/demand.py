"""What a request asks of the workers, as placement and admission see it. Pure.

Who has a prompt's first blocks, and where a worker could get them from. Pure.

The worker decides whether fetching is worth it, and asks its host's pool node by itself. So
prefixes that are asked for at several workers end up at all of them, and in their pool nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvpool.core.layout.block_names import BlockNames, HashChain
from kvrelay.messages import PoolUpdate, PrefixSource, WorkerHello
from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from kvrelay.types import NO_OBJECTIVES, Incarnation, Objectives, RequestSpec
from router.core.promises.work import NOTHING_PROMISED, Promised
from router.core.state.candidate import Arrival, Candidate, PromptPrediction, PromptWay, Way
from router.core.state.directory import Directory
from router.core.state.worker_view import Naming, WorkerView

_WorkerViews = Mapping[Incarnation, WorkerView]
KeptChains = dict[tuple[Naming, int], HashChain]
"""# naming, tokens of the context |-> the names of its blocks"""

Held = Mapping[Incarnation, int]
"""# holder |-> how many of the prompt's first blocks it has"""


@dataclass(slots=True)
class HeldPrefixes:
    """Of one prompt. Workers of one naming share its names. They are made once, and only if
    somebody asks; `chains` keep them for the next decision about the request."""

    spec: RequestSpec
    directory: Directory
    chains: KeptChains = field(default_factory=dict)
    _found: dict[Naming, Held] = field(default_factory=dict)
    _best: dict[Naming, PrefixSource | None] = field(default_factory=dict)
    _tokens: dict[Incarnation, int] = field(default_factory=dict)

    def blocks(self, worker: WorkerView) -> Held:
        """By those whose blocks `worker` can use."""
        found = self._found.get(worker.naming)
        if found is None:
            found = self._found[worker.naming] = self._look(worker)
        return found

    def _look(self, worker: WorkerView) -> Held:
        """At least the last token is computed, so it counts for nothing; so do all tokens of a
        prompt whose log probabilities are wanted."""
        if not self.directory.blocks or self.spec.is_scored:
            return {}
        tokens = self.spec.context_tokens
        chain = self.chains.get((worker.naming, tokens))
        if chain is None:
            chain = self.chains[worker.naming, tokens] = self._chain(worker.hello)
        return self.directory.longest(chain.full(tokens - 1))

    def _chain(self, hello: WorkerHello) -> HashChain:
        names = BlockNames(
            fingerprint=hello.fingerprint,
            physical_format=hello.physical_format,
            rope_border_tokens=hello.rope_border_tokens,
        )
        chain = names.chain(self.spec.tenant, self.spec.context_tokens, hello.block_size)
        return chain.begin(self.spec)

    def tokens(self, worker: WorkerView) -> int:
        """What the worker has itself, or its host's pool node."""
        found = self._tokens.get(worker.incarnation)
        if found is None:
            found = self._tokens[worker.incarnation] = self._count(worker)
        return found

    def own_tokens(self, worker: WorkerView) -> int:
        """What is on the worker's device."""
        return self.blocks(worker).get(worker.incarnation, 0) * worker.hello.block_size

    def _count(self, worker: WorkerView) -> int:
        own = self.blocks(worker).get(worker.incarnation, 0)
        if self.directory.pool_nodes:
            own = max(own, self._near(worker))
        return own * worker.hello.block_size

    def tokens_each(self, workers: Sequence[WorkerView]) -> list[int]:
        """# worker |-> `tokens`"""
        if self.directory.pool_nodes:
            return [self.tokens(worker) for worker in workers]
        found = self._found
        for worker in workers:
            if worker.naming not in found:
                self.blocks(worker)
        return [found[w.naming].get(w.incarnation, 0) * w.hello.block_size for w in workers]

    def source(self, workers: _WorkerViews, asked: WorkerView) -> PrefixSource | None:
        """The worker, or pool node of another host, with most of the prompt: of several a worker,
        and of these the least busy. None if `asked` has as much itself."""
        held = self.blocks(asked)
        if not held:
            return None
        best = self._worker(workers, asked)
        for far in self._far(asked) if self.directory.pool_nodes else ():
            best = far if best is None or far.blocks > best.blocks else best
        own = held.get(asked.incarnation, 0)
        return best if best is not None and best.blocks > own else None

    def handoff_source(
        self, workers: _WorkerViews, prefill: WorkerView | None, decode: WorkerView
    ) -> PrefixSource | None:
        """Where `decode` finds what `prefill` computes, if that comes through the pool: at the pool
        node of that one's host, if it is another host. None for `prefill`: it isn't chosen yet."""
        if not decode.hello.handoff_by_pool:
            return None
        node = None if prefill is None else self.directory.node_of(prefill.incarnation)
        if node is not None and decode.incarnation in node.workers:
            return None
        if node is None or not node.addresses:
            return self.source(workers, decode)
        blocks = self.spec.context_tokens // decode.hello.block_size
        return _in_node(node, blocks) if blocks else None

    def _worker(self, workers: _WorkerViews, asked: WorkerView) -> PrefixSource | None:
        if asked.naming not in self._best:
            self._best[asked.naming] = _most(self.blocks(asked), workers)
        return self._best[asked.naming]

    def _near(self, worker: WorkerView) -> int:
        """What its host's pool node has."""
        near = (n for node, n in self._nodes(worker) if worker.incarnation in node.workers)
        return max(near, default=0)

    def _nodes(self, worker: WorkerView) -> list[tuple[PoolUpdate, int]]:
        """Those that have some of it."""
        held, nodes = self.blocks(worker), self.directory.pool_nodes
        return [(node, held[name]) for name, node in nodes.items() if name in held]

    def _far(self, asked: WorkerView) -> Iterator[PrefixSource]:
        """Pool nodes that have more than the one of its own host."""
        near = self._near(asked)
        for node, blocks in self._nodes(asked):
            if blocks > near and node.addresses:
                yield _in_node(node, blocks)


def _in_node(node: PoolUpdate, blocks: int) -> PrefixSource:
    return PrefixSource(peer=node.node, addresses=node.addresses, blocks=blocks, is_pool_node=True)


def _most(held: Held, workers: _WorkerViews) -> PrefixSource | None:
    blocks = max([blocks for holder, blocks in held.items() if holder in workers], default=0)
    if not blocks:
        return None
    having_most = (h for h, n in held.items() if n == blocks and h in workers)
    _, peer = max((-workers[holder].prefill_load, holder) for holder in having_most)
    return PrefixSource(peer=peer, addresses=workers[peer].hello.transfer_addresses, blocks=blocks)


@dataclass(slots=True)
class Known:
    """What was found out in one decision, at one moment: it is the same for several of its ways."""

    prompts: dict[PromptWay, PromptPrediction] = field(default_factory=dict)
    arrivals: dict[Way, Arrival] = field(default_factory=dict)
    fitting: list[Incarnation] | None = None  # the workers for which these ways were suggested
    ways: list[Candidate] = field(default_factory=list)
    more_ways: Iterator[Candidate] = field(default_factory=lambda: iter(()))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """`output_tokens` is how many each choice will probably have. It is of one `tier` of the
    `tiers`. `waited_s` of its time to first token are over. What others were `promised` for the
    time that it would wait goes before it, for each prefill worker and each decode worker; the
    `line` is all that was promised, which goes before it if it has to come back. `known` is shared
    by all ways that are looked at in one decision. `displaced`: it was admitted before."""

    spec: RequestSpec
    output_tokens: int
    held: HeldPrefixes
    objectives: Objectives = NO_OBJECTIVES
    tier: QosTier = ONE_TIER.tiers[0]
    tiers: QosTiers = ONE_TIER
    waited_s: float = 0.0
    promised: Promised = NOTHING_PROMISED
    line: Promised = NOTHING_PROMISED
    known: Known | None = None
    displaced: bool = False

    @cached_property
    def priority(self) -> int:
        """A lower one goes first."""
        return self.tier.priority

    @cached_property
    def prompt_tokens(self) -> int:
        """To be computed, with those that earlier attempts emitted."""
        return self.spec.context_tokens

    @property
    def decodes(self) -> bool:
        """It may have more than its first token."""
        return self.spec.sampling.max_tokens - len(self.spec.emitted_ids) > 1

    @property
    def is_prompt_only(self) -> bool:
        """It has no output: nothing is handed over."""
        return not self.spec.sampling.max_tokens

    def is_for(self, worker: WorkerView) -> bool:
        """The worker's rule admits the prompt. What was emitted already doesn't count."""
        return worker.hello.takes.admits(len(self.spec.prompt_ids), self.tier.name)

    @cached_property
    def choices(self) -> int:
        return self.spec.sampling.n

    @cached_property
    def mean_tokens(self) -> int:
        """A choice's context while it decodes, on average."""
        return self.prompt_tokens + (self.output_tokens + 1) // 2

    @cached_property
    def kv_tokens(self) -> int:
        """The contexts of all choices."""
        return self.choices * self.mean_tokens

    @cached_property
    def longest_tokens(self) -> int:
        """Prompt and output, if it generates all it may."""
        return len(self.spec.prompt_ids) + self.spec.sampling.max_tokens
