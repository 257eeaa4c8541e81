"""One worker's model over its paged KV memory: a batch of slices in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.attention.backend import Backend, Prepared, Replays
from engine.attention.torch_paged import PagedAttention
from engine.attention.torch_plan import Planner
from engine.core.sizing import KvSizing
from engine.core.step import SequenceSlice, StepBatch, StepOutcome, row_owners
from engine.device.layer_marks import LayerLag, LayerMarks, LayerWatch, after_stages
from engine.device.streams import StepStream
from engine.flight import Flight, Launched, ToldStep, next_tokens
from engine.model.families import LongRope
from engine.model.kv_layout import layer_places
from engine.model.model import Model
from engine.parallel.message import StepKind
from engine.parallel.ranks import ALONE, Ranks
from engine.sampling.grammars import Grammars, Masks
from engine.sampling.parameters import KeptParameters
from engine.sampling.sampler import Scored, draw, score
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """A worker's facts about its model. `fingerprint` must be equal on both sides of a handoff."""

    architecture: str
    vocab_size: int
    max_model_len: int
    fingerprint: str
    device: str
    dtype: str


class Engine:
    """Runs steps. One thread launches them; another may collect them. With several ranks this is
    rank 0. Its `memory` has all heads, and it computes its own; `close` ends the others."""

    def __init__(
        self,
        model: Model,
        memory: KvMemory,
        facts: EngineFacts,
        sizing: KvSizing,
        *,
        needs_masks: bool = False,
        own: KvMemory | None = None,
        backend: Backend | None = None,
        goes_first: bool = False,
        ranks: Ranks = ALONE,
        grammars: Grammars | None = None,
    ) -> None:
        """`own`: this rank's part of `memory`; None: all of it. `backend` None: attention in plain
        torch operations. `goes_first`: before the steps of other workers on the device. `grammars`
        None: no output can be constrained."""
        self.model = model
        self.memory = memory
        self.facts = facts
        self.sizing = sizing
        self.grammars = grammars or Grammars(None, vocab=facts.vocab_size, reason="no tokenizer")
        self._ranks = ranks
        self._own = own or memory
        self._planner = Planner(self._own.layout, model.device, model.dtype, needs_masks)
        self._stream = StepStream(model.device, goes_first=goes_first)
        self._watch = LayerWatch() if model.device.type == "cuda" else None
        self._places = layer_places(self._own.layout)
        self._parameters = KeptParameters()
        self.backend = backend
        self.graphs: Replays | None = None
        """Runs the recorded steps, instead of the model."""

    @property
    def layout(self) -> KvLayout:
        return self.memory.layout

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        """Writes the KV of every slice and samples as the batch asks; done on return.

        A layer of `marks` is reported once it has all slices' KV, and before this returns.
        """
        return self.launch(batch, marks).collect()

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Of its steps; None on a CPU."""
        return self._stream.stream

    @property
    def can_follow(self) -> bool:
        """True if a step can be launched before the tokens of the one before are known."""
        return self.model.longrope is None and self.stages == 1

    @property
    def stages(self) -> int:
        """With several, others compute a launched step while this one collects those before."""
        return 1 if self.model.stage is None else self.model.stage.count

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Launched | None = None
    ) -> Launched:
        """Like `run`, but on a GPU or in a pipeline not done on return. `before` is the step
        launched last, which slices may follow, but not in a pipeline."""
        if self.stages == 1:
            assert not isinstance(before, ToldStep)
            return self._launch(batch, marks, before)
        self._ranks.tell(batch.slices, StepKind())
        if self.model.on_cpu:
            return ToldStep(batch, lambda told: self._launch(told.batch, marks, None).collect())
        return self._launch(batch, marks, None)

    @torch.inference_mode()
    def _launch(self, batch: StepBatch, marks: LayerMarks | None, before: Flight | None) -> Flight:
        wanted = [piece.samples for piece in batch.slices if piece.samples]
        indices = [piece.index for piece in batch.slices if piece.samples]
        if marks is not None and self._watch is not None:
            marks = self._watch.behind(marks)
        with self._stream.within():
            logits = self._marked_logits(batch, marks, next_tokens(batch.slices, before))
            scored: Scored | None = None
            if len(logits) > len(wanted):
                scored = score(logits[len(wanted) :], batch.slices)
                logits = logits[: len(wanted)]
            masks = self._masks(batch.slices, before)
            drawn = draw(logits, wanted, indices, masks, self._parameters)
            return Flight(batch, logits, drawn, self._stream.mark(), self._collect, scored)

    def _masks(self, slices: Sequence[SequenceSlice], before: Flight | None) -> Masks | None:
        """A GPU computes the step meanwhile. Where a slice follows another, its draw waits for the
        other's token, and the step's model pass does not."""

        def drawn_before(index: int) -> int:
            assert before is not None, "slices follow a step that was not launched"
            return before.drawn_id(index)

        return self.grammars.masks(slices, drawn_before)

    def _collect(self, flight: Flight) -> StepOutcome:
        if self._watch is not None:
            self._watch.drain()
        slices = flight.batch.slices
        with self._stream.beside():
            tokens, masks = iter(flight.drawn.sampled()), flight.drawn.masks
            return StepOutcome(
                sampled=tuple([next(tokens) if s.samples else () for s in slices]),
                prompt_logprobs={} if flight.scored is None else flight.scored.told(),
                failed={} if masks is None else masks.failed,
            )

    def logits(
        self,
        batch: StepBatch,
        marks: LayerMarks | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the step; fp32 `[rows, vocab]`, in the order of `engine.core.step`. `token_ids`
        `[slices]`, on the device, replace the tokens of slices with one token each."""
        if self.graphs is not None and marks is None and self.graphs.has(batch.slices):
            kind = StepKind(follows=token_ids is not None, is_recorded=True)
            self._ranks.tell(batch.slices, kind)
            found = self.graphs.logits(batch.slices, self._given(token_ids))
            return found.to(torch.float32, copy=True)
        if self.model.longrope is None:
            return self._forward(batch.slices, marks, token_ids)
        return self._forward_apart(self.model.longrope, batch.slices)

    @torch.inference_mode()
    def follow(self, slices: Sequence[SequenceSlice], kind: StepKind) -> None:
        """This rank's part of a step of rank 0."""
        rope, token_ids = self.model.longrope, None
        if kind.follows:
            nothing = torch.zeros(len(slices), dtype=torch.long, device=self.model.device)
            token_ids = self._given(nothing)
        if kind.is_recorded:
            assert self.graphs is not None, "all ranks have recorded the same steps"
            self.graphs.logits(slices, token_ids)
            return
        with nullcontext() if rope is None else rope.long(kind.is_long):
            self._pass(slices, None, token_ids)

    def _given(self, token_ids: torch.Tensor | None) -> torch.Tensor | None:
        """On all ranks those of rank 0; the others bring zeros."""
        own = self._ranks.own
        if token_ids is None or own is None or own.group is None:
            return token_ids
        return own.group.sum(token_ids.clone())

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.grammars.close()
        self.graphs = None  # NCCL waits for graphs that have its sums before it ends
        self._ranks.close()

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """`lost` is called on a thread when another rank has ended by itself."""
        self._ranks.watch(lost)

    def copy_blocks(self, pairs: CopyPairs) -> None:
        self.memory.copy_blocks(pairs)

    def _marked_logits(
        self, batch: StepBatch, marks: LayerMarks | None, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """The other ranks have surely written a layer when this one reaches the next: it had to
        wait for their parts in between."""
        if self.stages > 1:
            return self._last_stage(batch, marks)
        if marks is None or self._ranks.own is None:
            return self.logits(batch, marks, token_ids)
        lag = LayerLag(marks)
        logits = self.logits(batch, lag.before(self._places), token_ids)
        lag.end()
        return logits

    def _last_stage(self, batch: StepBatch, marks: LayerMarks | None) -> torch.Tensor:
        """The other ranks have been told of it. When this stage's first layer is written, earlier
        stages have written all of theirs."""
        if marks is None:
            return self._pass(batch.slices)
        lag = LayerLag(marks)
        own = lag.before(self._places)
        logits = self._pass(batch.slices, after_stages(marks, own, min(self._places)))
        lag.end()
        return logits

    def _forward_apart(self, rope: LongRope, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Short and long sequences run in separate calls; the logits come back in order. No layer
        has all slices' KV before the last call."""
        parts: list[torch.Tensor] = []
        places: list[tuple[bool, int]] = []
        for is_long in (False, True):
            picked = [i for i, s in enumerate(slices) if rope.needs_long(s) == is_long]
            if not picked:
                continue
            with rope.long(is_long):
                parts.append(self._forward([slices[i] for i in picked], is_long=is_long))
            places += row_owners(slices, picked)
        order = sorted(range(len(places)), key=places.__getitem__)
        return torch.cat(parts)[order]

    def _forward(
        self,
        slices: Sequence[SequenceSlice],
        marks: LayerMarks | None = None,
        token_ids: torch.Tensor | None = None,
        *,
        is_long: bool = False,
    ) -> torch.Tensor:
        if self._ranks.own is not None:
            self._ranks.tell(slices, StepKind(is_long=is_long, follows=token_ids is not None))
            token_ids = self._given(token_ids)
        return self._pass(slices, marks, token_ids)

    def _pass(
        self,
        slices: Sequence[SequenceSlice],
        marks: LayerMarks | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One ragged call of the model; the other ranks know of it."""
        step = self._prepare(slices, marks)
        if self.model.stage is not None:
            self.model.stage.expect(step.token_ids.shape[1])
        if token_ids is not None:
            step.token_ids[0].index_copy_(0, step.logit_rows, token_ids)
        inputs = (step.token_ids, step.positions, step.logit_rows)
        return self.model.forward(*inputs, step.state).float()

    def _prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None) -> Prepared:
        if self.backend is not None:
            return self.backend.prepare(slices, marks)
        plan = self._planner.plan(slices)
        return Prepared(
            token_ids=plan.token_ids,
            positions=plan.positions,
            logit_rows=plan.logit_rows,
            state=PagedAttention(self._own, plan, self._places, marks),
        )
