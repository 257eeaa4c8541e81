"""Log probabilities of prompts: which rows the engine scores, who computes them, who is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.core import step
from engine.core.sizing import EngineLimits
from engine.core.step import (
    MOST_SCORED_TOKENS,
    Sampled,
    Scoring,
    SequenceSlice,
    StepBatch,
    StepDone,
    StepOutcome,
    StepWanted,
    Tick,
    scoring_of,
)
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvrelay.messages import Abort, Generate, Lifetime, Prefill, PromptLogprobs, Tokens
from kvrelay.types import FinishReason, Incarnation, PromptLogprob, Role
from prefill_worker.scheduler import PrefillScheduler
from router.core.core import RouterCore
from router.core.events import Admit, Command, Deliver, Send, Submitted, WorkerJoined, WorkerLost
from tests.drive import Running, start
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.unit import router_kit, worker_kit
from tests.unit.router_kit import core_with, failed, hello, piece, released, reserved, says, tokens
from tests.unit.worker_kit import decode_scheduler, events, prefill_of, prefill_scheduler, the_step

LIMITS = EngineLimits(max_model_len=None, prefill_chunk_tokens=64, max_running_requests=8)
WITHIN = 1e-4


# --- the engine -----------------------------------------------------------------------------------


CASES = [("llama", "auto"), ("llama", "sdpa"), ("gemma2", "auto"), ("phi3_longrope", "auto")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    family, attention = request.param
    folder = random_checkpoint(tmp_path_factory.mktemp("model"), family)
    found = load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype="float32",
        block_size=16,
        blocks=64,
        limits=LIMITS,
        attention=attention,
    )
    yield found
    found.close()


def _prompt(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(count)]


def scored(one: Running, chunk_tokens: int, top: int) -> SequenceSlice:
    plain = one.next_slice(chunk_tokens)
    end = plain.start + len(plain.token_ids)
    next_ids = tuple(one.prompt[plain.start + 1 : end + 1])
    return replace(plain, scoring=Scoring(next_ids=next_ids, top=top) if next_ids else None)


def test_chunks_are_scored_beside_sequences_that_decode_and_plain_prompts(engine: Engine) -> None:
    check_scores(engine, references=engine)


def check_scores(engine: Engine, references: Engine) -> None:
    """Against transformers' own logits of the model that `references` has."""
    lengths = (40, 90, 100, 40)
    prompts = [_prompt(seed, length) for seed, length in enumerate(lengths)]
    decoding, first, second, plain = start(engine, prompts, max_tokens=8)
    alone = engine.run(StepBatch(slices=(decoding.next_slice(64),)))
    decoding.done_tokens, decoding.emitted = 40, [alone.sampled[0][0].token_id]
    found: dict[str, list[PromptLogprob]] = {first.name: [], second.name: []}
    for chunk in (30, 64):
        pieces = (
            scored(first, chunk, 2),
            decoding.next_slice(1),
            plain.next_slice(64),
            scored(second, chunk, 0),
        )
        outcome = engine.run(StepBatch(slices=pieces))
        assert set(outcome.prompt_logprobs) == {0, 3}
        assert [len(draws) for draws in outcome.sampled] == [chunk == 64, 1, 1, 0]
        for one, i in ((first, 0), (second, 3)):
            found[one.name] += outcome.prompt_logprobs[i]
            one.done_tokens += len(pieces[i].token_ids)
    assert [len(entries) for entries in found.values()] == [89, 94]
    _assert_scores(references, first.prompt, found[first.name], top=2)
    _assert_scores(references, second.prompt, found[second.name], top=0)


def _assert_scores(
    engine: Engine, prompt: list[int], entries: list[PromptLogprob], top: int
) -> None:
    ids = torch.tensor([prompt], device=engine.model.device)
    rows = torch.log_softmax(engine.model.eager_logits(ids)[0].float(), dim=-1).cpu()
    for row, token, entry in zip(rows, prompt[1:], entries, strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=WITHIN)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(top).values.tolist(), abs=WITHIN
        )


def test_a_slice_scores_what_follows_in_the_prompt_alone() -> None:
    """Not what earlier attempts emitted: that has log probabilities of its own."""
    spec = replace(worker_kit.spec("r", 5, prompt_logprobs=1), emitted_ids=(70, 71))
    assert scoring_of(spec, 0, 3) == Scoring(next_ids=(1, 2, 3), top=1)
    assert scoring_of(spec, 3, 7) == Scoring(next_ids=(4,), top=1)
    assert scoring_of(spec, 4, 7) is None
    assert scoring_of(worker_kit.spec("r", 5), 0, 3) is None


# --- the workers' schedulers ----------------------------------------------------------------------


def _entries(step: SequenceSlice) -> tuple[PromptLogprob, ...]:
    ids = () if step.scoring is None else step.scoring.next_ids
    return tuple(PromptLogprob(i, -1.0, 1) for i in ids)


def run_scored(scheduler: PrefillScheduler) -> list[SequenceSlice]:
    """The next step's slices."""
    return list(the_step(scheduler.handle(StepWanted(), 0)).batch.slices)


def ran(slices: list[SequenceSlice]) -> StepDone:
    scores = {i: _entries(one) for i, one in enumerate(slices) if one.scoring is not None}
    sampled = tuple(tuple(Sampled(token_id=9) for _ in one.samples) for one in slices)
    outcome = StepOutcome(sampled=sampled, prompt_logprobs=scores)
    return StepDone(outcome=outcome, seconds=0.1)


def told(commands: list[step.Command]) -> list[tuple[int, tuple[int, ...]]]:
    """# of each event: first position, tokens"""
    return [
        (event.first_position, tuple(entry.token_id for entry in event.entries))
        for event in events(commands)
        if isinstance(event, PromptLogprobs)
    ]


def test_a_prefill_worker_tells_them_chunk_by_chunk_before_the_first_token() -> None:
    scheduler = prefill_scheduler(chunk=4)
    scheduler.handle(prefill_of(worker_kit.spec("a", 6, prompt_logprobs=0)), 0)
    assert told(scheduler.handle(ran(run_scored(scheduler)), 0)) == [(1, (1, 2, 3, 4))]
    commands = scheduler.handle(ran(run_scored(scheduler)), 0)
    assert told(commands) == [(5, (5,))]
    kinds = [type(event) for event in events(commands)]
    assert kinds.index(PromptLogprobs) < kinds.index(Tokens)


def test_a_prefill_worker_computes_what_it_has_cached() -> None:
    scheduler = prefill_scheduler(chunk=16)
    for name in "ab":
        scheduler.handle(prefill_of(worker_kit.spec(name, 12)), 0)
        (plain,) = run_scored(scheduler)
        scheduler.handle(ran([plain]), 0)
    assert plain.start > 0
    scheduler.handle(prefill_of(worker_kit.spec("c", 12, prompt_logprobs=1)), 0)
    commands = scheduler.handle(StepWanted(), 0)
    (scored,) = the_step(commands).batch.slices
    assert (scored.start, len(scored.token_ids)) == (0, 12)
    (moment,) = [event for event in events(commands) if isinstance(event, Lifetime)]
    assert moment.tokens == 0


def test_a_step_scores_so_many_tokens_at_most() -> None:
    """What is left of the step goes to others."""
    scheduler = prefill_scheduler(chunk=1024, blocks=1024)
    scheduler.handle(prefill_of(worker_kit.spec("a", 700, prompt_logprobs=0)), 0)
    scheduler.handle(prefill_of(worker_kit.spec("b", 700, prompt_logprobs=0)), 0)
    scheduler.handle(prefill_of(worker_kit.spec("c", 700)), 0)
    steps = []
    while scheduler.has_work:
        slices = run_scored(scheduler)
        steps.append([(one.key.request_id, len(one.token_ids)) for one in slices])
        scheduler.handle(ran(slices), 0)
    rows = [sum(count for name, count in step if name != "c") for step in steps]
    assert max(rows) == MOST_SCORED_TOKENS
    assert steps[0] == [("a", 512), ("c", 512)]
    assert sum(rows) == 1400


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("n", [1, 3])
def test_where_no_token_is_wanted_a_prompt_ends_when_it_is_computed(count: int, n: int) -> None:
    """Nobody else hears of it."""
    scheduler = prefill_scheduler(chunk=4, canary_every=1)
    spec = worker_kit.spec("a", count, n=n, max_tokens=0, prompt_logprobs=0)
    commands = scheduler.handle(Prefill(spec=spec, target_addresses=(), target=None), 0)
    assert worker_kit.names(commands) == ["Reserved", "prefill_received"]
    while scheduler.has_work:
        scheduler.handle(Tick(), 0)
        commands += scheduler.handle(ran(run_scored(scheduler)), 0)
    assert [first for first, _ in told(commands)] == [1, 5][: (count + 2) // 4]
    ends = [event for event in events(commands) if isinstance(event, Tokens)]
    assert [(one.choice, one.token_ids, one.finish_reason) for one in ends] == [
        (choice, (), FinishReason.LENGTH) for choice in range(n)
    ]
    assert worker_kit.names(commands)[-1] == "Released"
    assert not worker_kit.to_peer(commands)
    scheduler.validate()


@pytest.mark.parametrize("on_device", [True, False])
def test_such_a_prompt_can_be_aborted(on_device: bool) -> None:
    scheduler = prefill_scheduler(chunk=4)
    spec = worker_kit.spec("a", 6, max_tokens=0, prompt_logprobs=0)
    scheduler.handle(Prefill(spec=spec, target_addresses=(), target=None), 0)
    slices = run_scored(scheduler) if on_device else []
    commands = scheduler.handle(Abort(key=spec.key), 0)
    if on_device:
        assert commands == []
        commands = scheduler.handle(ran(slices), 0)
    assert worker_kit.names(commands)[-1] == "Released"
    assert not worker_kit.to_peer(commands)
    assert not scheduler.has_work
    scheduler.validate()


def test_a_sequence_that_decodes_is_not_scored_again() -> None:
    """As after a preemption, when its prompt is computed anew."""
    scheduler = decode_scheduler(chunk=8)
    scheduler.handle(Generate(spec=worker_kit.spec("a", 6, prompt_logprobs=0)), 0)
    step = the_step(scheduler.handle(StepWanted(), 0))
    assert step.batch.slices[0].scoring is not None
    scheduler.handle(ran(list(step.batch.slices)), 0)
    (sequence,) = scheduler.batch.running_set.running
    scheduler.batch.running_set.preempt(sequence)
    (again,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert again.scoring is None


# --- the router -----------------------------------------------------------------------------------

P, P2, D = Incarnation("p"), Incarnation("p2"), Incarnation("d")


def submit(core: RouterCore, *, max_tokens: int, n: int = 1) -> list[Command]:
    plain = router_kit.request(n=n, max_tokens=max_tokens)
    asked = replace(plain, sampling=replace(plain.sampling, prompt_logprobs=0))
    return core.handle(Submitted(request=asked), 1)


def scores(first: int, count: int, attempt: int = 0) -> PromptLogprobs:
    entries = tuple(PromptLogprob(first + i, -1.0, 1) for i in range(count))
    key = router_kit.key(attempt=attempt)
    return PromptLogprobs(key=key, at_s=1.5, first_position=first, entries=entries)


def test_a_request_without_output_needs_a_prefill_worker_alone() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE)
    asked = replace(router_kit.spec(n=2).sampling, max_tokens=0, prompt_logprobs=0)
    spec = replace(router_kit.spec(n=2), sampling=asked)
    alone = Prefill(spec=spec, target_addresses=(), target=None)
    assert submit(core, max_tokens=0, n=2) == [Send(worker=P, message=alone)]
    request = core.state.requests["r"]
    assert says(core, "p", reserved()) == [Admit(request_id="r")]
    assert core.state.workers[D].outlook.sequences == 0
    ends = [tokens(0, choice=choice, reason=FinishReason.LENGTH) for choice in range(2)]
    commands = says(core, "p", scores(1, len(router_kit.PROMPT) - 1), *ends, released())
    assert commands == [
        Deliver(
            request_id="r",
            tokens=(piece(choice=choice, reason=FinishReason.LENGTH),),
            done=choice == 1,
        )
        for choice in range(2)
    ]
    assert len(request.prompt_logprobs) == len(router_kit.PROMPT) - 1
    assert not core.state.requests
    assert len(core.state.workers[P].queue) == core.state.workers[P].outlook.sequences == 0


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
def test_without_any_prefill_worker_another_takes_it(role: Role) -> None:
    core = core_with(w=role)
    (asked,) = submit(core, max_tokens=0)
    assert isinstance(asked, Send) and isinstance(asked.message, Prefill)
    assert (asked.worker, asked.message.target) == (Incarnation("w"), None)


def test_it_takes_no_place_of_those_that_decode() -> None:
    """A list of prompts may be longer than there are places."""
    core = core_with(places=1, p=Role.PREFILL, d=Role.DECODE)
    for i in range(5):
        plain = router_kit.request(f"r{i}", max_tokens=0)
        (asked,) = core.handle(Submitted(request=plain), 1)
        assert isinstance(asked, Send), asked
        says(core, "p", reserved(f"r{i}"), running=1)
    assert len(core.state.workers[P].queue) == 5


def test_another_attempt_tells_them_again_and_each_counts_once() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE)
    submit(core, max_tokens=8)
    says(core, "d", reserved())
    request = core.state.requests["r"]
    says(core, "p", scores(1, 1))
    core.handle(WorkerJoined(hello=hello("p2", Role.PREFILL)), 2)
    core.handle(WorkerLost(incarnation=P), 3)
    (prefill,) = says(core, "d", reserved(attempt=1))
    assert isinstance(prefill, Send) and isinstance(prefill.message, Prefill)
    assert prefill.message.spec.sampling.prompt_logprobs == 0
    count = len(router_kit.PROMPT) - 1
    says(core, "p2", scores(1, count, attempt=1), tokens(0, 10, attempt=1))
    assert [entry.token_id for entry in request.prompt_logprobs] == [*range(1, count + 1)]


def test_what_is_known_is_not_asked_for_again() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    submit(core, max_tokens=8)
    says(core, "d", reserved())
    says(core, "p", scores(1, len(router_kit.PROMPT) - 1), tokens(0, 10))
    (asked, *_) = [c for c in says(core, "p", failed("transfer_failed")) if isinstance(c, Send)][
        -1:
    ]
    assert not isinstance(asked.message, Generate)
    assert core.state.requests["r"].spec.sampling.prompt_logprobs is None
