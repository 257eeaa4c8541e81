"""A request that goes on behind what it has emitted: its tokens are those of the run that nothing
interrupted, whatever its sampling, wherever it was cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.running_set import TierShares
from decode_worker.scheduler import DecodeScheduler
from engine.core.sizing import EngineLimits
from engine.core.step import Command, Emit, RunStep, StepDone, StepWanted
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.hashes import block_hashes
from kvpool.core.transfer.slabs import SlabPool
from kvrelay.messages import Generate, Prefill, Tokens
from kvrelay.qos import ONE_TIER
from kvrelay.types import Context, FinishReason, Incarnation, RequestKey, RequestSpec, Sampling
from prefill_worker.scheduler import PrefillScheduler
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.unit.worker_kit import local_lookup

CHUNK_TOKENS, BLOCK_SIZE, TOKENS = 64, 16, 40
STOPS = tuple(range(2, VOCAB_SIZE, 3))

SAMPLINGS = {
    "greedy": Sampling(max_tokens=TOKENS, seed=1),
    "seeded": Sampling(max_tokens=TOKENS, seed=7, temperature=1.0, top_p=0.95),
    "repetition": Sampling(max_tokens=TOKENS, seed=1, repetition_penalty=1.3),
    "frequency": Sampling(max_tokens=TOKENS, seed=3, temperature=0.8, frequency_penalty=0.9),
    "presence": Sampling(max_tokens=TOKENS, seed=1, presence_penalty=1.5),
    "min_tokens": Sampling(
        max_tokens=TOKENS, seed=5, temperature=1.0, min_tokens=33, stop_token_ids=STOPS
    ),
    "logprobs": Sampling(max_tokens=TOKENS, seed=1, logprobs=3),
    "grammar": Sampling(
        max_tokens=TOKENS, seed=9, temperature=1.0, grammar="start: /([a-z ]{2,5}[0-9]){90}/"
    ),
}


def engine_of(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    *,
    attention: str = "auto",
    device: str = "cpu",
) -> Engine:
    limits = EngineLimits(
        max_model_len=None, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=8
    )
    return load_engine(
        open_checkpoint(str(random_checkpoint(tmp_path_factory.mktemp(family), family))),
        device=device,
        dtype="float32",
        block_size=BLOCK_SIZE,
        blocks=64,
        limits=limits,
        attention=attention,
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of(tmp_path_factory, "llama")


def asked(sampling: Sampling, prompt_tokens: int = 50) -> RequestSpec:
    letters = random.Random(5)
    prompt = tuple(letters.randrange(2, VOCAB_SIZE) for _ in range(prompt_tokens))
    return RequestSpec(key=RequestKey("r", 0), prompt_ids=prompt, sampling=sampling)


def tables_of(engine: Engine) -> BlockTables:
    border = engine.model.longrope.border_tokens if engine.model.longrope else None
    tables = BlockTables(engine.layout, engine.memory.blocks)
    tables.names = replace(tables.names, rope_border_tokens=border)
    return tables


def decoder(engine: Engine) -> DecodeScheduler:
    tables = tables_of(engine)
    reservations = Reservations(
        tables=tables, slabs=SlabPool(1 << 20, 0), regions={}, leases=LeaseTable(30.0)
    )
    batch = Batch(
        lookup=local_lookup(tables),
        chunk_tokens=CHUNK_TOKENS,
        shares=TierShares(slots=8, qos=ONE_TIER),
        rope_border_tokens=tables.names.rope_border_tokens,
    )
    return DecodeScheduler(reservations=reservations, batch=batch)


def run(
    engine: Engine, scheduler: DecodeScheduler | PrefillScheduler, begun: list[Command]
) -> list[Tokens]:
    """All that it says, until there is nothing left to run."""
    commands = begun
    while step := scheduler.handle(StepWanted(), 0):
        commands += step
        for one in step:
            if isinstance(one, RunStep):
                commands += scheduler.handle(ran(engine, one), 0)
    events = (event for one in commands if isinstance(one, Emit) for event in one.events)
    return [event for event in events if isinstance(event, Tokens)]


def ran(engine: Engine, step: RunStep) -> StepDone:
    for pairs in step.copies:
        engine.copy_blocks(pairs)
    return StepDone(outcome=engine.run(step.batch), seconds=0.1)


def generate(engine: Engine, spec: RequestSpec) -> list[Tokens]:
    scheduler = decoder(engine)
    return run(engine, scheduler, scheduler.handle(Generate(spec=spec), 0))


def prefill(engine: Engine, spec: RequestSpec) -> Tokens:
    scheduler = PrefillScheduler(lookup=local_lookup(tables_of(engine)), chunk_tokens=CHUNK_TOKENS)
    message = Prefill(spec=spec, target_addresses=("sim:d",), target=Incarnation("d"))
    (said,) = run(engine, scheduler, scheduler.handle(message, 0))
    return said


def ids_of(said: list[Tokens]) -> tuple[int, ...]:
    return tuple(token for one in said for token in one.token_ids)


def cut(spec: RequestSpec, whole: list[Tokens], emitted: int) -> RequestSpec:
    return replace(spec, key=RequestKey("r", 1), emitted_ids=ids_of(whole)[:emitted])


def close(one: Tokens, other: Tokens) -> bool:
    """The same but for the attempt, and what batches change in a logprob."""
    mine = [(entry.token_id, entry.logprob) for entry in one.logprobs]
    theirs = [(entry.token_id, entry.logprob) for entry in other.logprobs]
    assert mine == [(token, pytest.approx(value, abs=1e-4)) for token, value in theirs]
    fields = ("choice", "first_index", "token_ids", "finish_reason", "stop_token_id")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("emitted", [1, 13, 14, 32])
def test_it_goes_on_as_if_nothing_had_happened(engine: Engine, kind: str, emitted: int) -> None:
    """Cut within a block, at its border (50 + 14) and just before the end of `min_tokens`."""
    spec = asked(SAMPLINGS[kind])
    whole = generate(engine, spec)
    assert len(whole) > 32 and whole[-1].finish_reason is not None
    resumed = cut(spec, whole, emitted)
    again = generate(engine, resumed)
    assert len(again) == len(whole) - emitted
    assert all(close(*pair) for pair in zip(again, whole[emitted:], strict=True))
    assert close(prefill(engine, resumed), whole[emitted])


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("emitted", [(13, 0, 14), (1, 32, 5), (20, None, 9)])
def test_each_choice_goes_on_behind_its_own_tokens(
    engine: Engine, kind: str, emitted: tuple[int | None, ...]
) -> None:
    """Some have no token yet, and one (None) has ended. Nothing is said of what was emitted."""
    spec = asked(replace(SAMPLINGS[kind], n=3))
    whole = [[one for one in generate(engine, spec) if one.choice == c] for c in range(3)]
    again = generate(engine, cut_each(spec, whole, emitted))
    for choice, (known, cut_at) in enumerate(zip(whole, emitted, strict=True)):
        rest = [] if cut_at is None else known[cut_at:]
        new = [one for one in again if one.choice == choice]
        assert len(new) == len(rest)
        assert all(close(*pair) for pair in zip(new, rest, strict=True))


def test_the_prefill_worker_draws_only_for_choices_that_have_no_token(engine: Engine) -> None:
    spec = asked(replace(SAMPLINGS["seeded"], n=3))
    whole = [[one for one in generate(engine, spec) if one.choice == c] for c in range(3)]
    resumed = cut_each(spec, whole, (3, 0, None))
    assert close(prefill(engine, resumed), whole[1][0])


def test_only_tokens_that_are_told_count_as_generated(engine: Engine) -> None:
    spec = asked(replace(SAMPLINGS["greedy"], n=3))
    whole = [[one for one in generate(engine, spec) if one.choice == c] for c in range(3)]
    scheduler = decoder(engine)
    resumed = cut_each(spec, whole, (3, 0, None))
    said = run(engine, scheduler, scheduler.handle(Generate(spec=resumed), 0))
    assert scheduler.generated_tokens == len(ids_of(said))


def cut_each(
    spec: RequestSpec, whole: list[list[Tokens]], emitted: tuple[int | None, ...]
) -> RequestSpec:
    return replace(
        spec,
        key=RequestKey("r", 1),
        resumed=tuple(
            ids_of(one)[: cut_at or 0] for one, cut_at in zip(whole, emitted, strict=True)
        ),
        finished_choices=tuple(i for i, cut_at in enumerate(emitted) if cut_at is None),
    )


def test_penalties_and_minimum_decide_in_these_runs(engine: Engine) -> None:
    """Else the test above would show nothing."""
    found = {kind: ids_of(generate(engine, asked(one))) for kind, one in SAMPLINGS.items()}
    assert len({found[kind] for kind in found if kind != "logprobs"}) == len(found) - 1
    free = replace(SAMPLINGS["min_tokens"], min_tokens=0)
    assert len(generate(engine, asked(free))) < 33


def test_the_last_token_ends_it(engine: Engine) -> None:
    spec = asked(SAMPLINGS["greedy"])
    resumed = cut(spec, generate(engine, spec), TOKENS - 1)
    last = prefill(engine, resumed)
    assert (last.first_index, last.finish_reason) == (TOKENS - 1, FinishReason.LENGTH)


@pytest.mark.parametrize("emitted", [5, 6, 7, 20])
def test_across_the_border_of_longrope(
    tmp_path_factory: pytest.TempPathFactory, emitted: int
) -> None:
    """The prompt is short, the whole is long: cut before, at and behind the border."""
    longrope = engine_of(tmp_path_factory, "phi3_longrope")
    assert longrope.model.longrope is not None
    spec = asked(SAMPLINGS["greedy"], prompt_tokens=longrope.model.longrope.border_tokens - 6)
    whole = generate(longrope, spec)
    again = generate(longrope, cut(spec, whole, emitted))
    assert ids_of(again) == ids_of(whole)[emitted:]


def test_what_outgrows_the_border_of_longrope_leaves_short_ones_their_blocks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its own are computed anew, and have other names."""
    longrope = engine_of(tmp_path_factory, "phi3_longrope")
    assert longrope.model.longrope is not None
    grows = asked(SAMPLINGS["greedy"], prompt_tokens=longrope.model.longrope.border_tokens - 6)
    short = replace(grows, key=RequestKey("s", 0), prompt_ids=grows.prompt_ids[:200])
    alone = generate(longrope, short)
    scheduler = decoder(longrope)
    whole = run(longrope, scheduler, scheduler.handle(Generate(spec=grows), 0))
    assert ids_of(whole) == ids_of(generate(longrope, grows))
    after = run(longrope, scheduler, scheduler.handle(Generate(spec=short), 0))
    assert ids_of(after) == ids_of(alone)


def test_what_was_decoded_is_found_again(engine: Engine) -> None:
    """The blocks of the run that was cut have the names of those that the next one looks for."""
    scheduler = decoder(engine)
    spec = asked(SAMPLINGS["greedy"])
    whole = run(engine, scheduler, scheduler.handle(Generate(spec=spec), 0))
    before = scheduler.prompt_tokens
    again = run(engine, scheduler, scheduler.handle(Generate(spec=cut(spec, whole, 31)), 0))
    assert ids_of(again) == ids_of(whole)[31:]
    assert scheduler.prompt_tokens == before  # of 81 tokens the last one alone is run
    resumed = run(engine, scheduler, scheduler.handle(Generate(spec=cut(spec, whole, 30)), 0))
    assert ids_of(resumed) == ids_of(whole)[30:]
    assert scheduler.prompt_tokens == before + 16  # its last block is computed again


def test_a_context_is_the_sequence_of_its_parts() -> None:
    context = Context((1, 2, 3), (4, 5))
    assert [context[i] for i in range(-5, 5)] == [1, 2, 3, 4, 5] * 2
    assert (*context,) == (1, 2, 3, 4, 5)
    for start in range(6):
        for stop in range(start, 7):
            assert tuple(context[start:stop]) == (1, 2, 3, 4, 5)[start:stop], (start, stop)


def test_names_do_not_tell_prompt_from_output(engine: Engine) -> None:
    tables = tables_of(engine)
    spec = asked(SAMPLINGS["greedy"])
    parted = replace(spec, prompt_ids=spec.prompt_ids[:20], emitted_ids=(*spec.prompt_ids[20:],))
    named = tables.names_of(parted).full(50).hashes()
    assert named == tables.names_of(spec).full(50).hashes()
    salt = tables.names_of(spec).salt
    first = block_hashes(spec.prompt_ids[:BLOCK_SIZE], block_size=BLOCK_SIZE, salt=salt)
    assert named[:1] == first
