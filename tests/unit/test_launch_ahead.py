"""An engine that launches steps before the tokens of those before are known tells the same."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import (
    Command,
    Emit,
    OverlapStepWanted,
    RunStep,
    SampleRequest,
    SequenceSlice,
    StepBatch,
    StepDone,
    StepWanted,
)
from engine.flight import Flight
from engine.runner import Engine
from kvpool.core.blocks.holding import Holder
from kvpool.core.layout.layout import BlockId
from kvrelay.messages import Generate, Tokens
from kvrelay.types import RequestKey, RequestSpec, Sampling, TokenLogprobs
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.unit.test_parallel import ranks
from tests.unit.test_resuming import SAMPLINGS, STOPS, decoder, engine_of

TOKENS = 24
AHEAD = ("greedy", "seeded", "min_tokens", "logprobs", "grammar")
"""Those whose model pass needs no earlier tokens on the host."""


@pytest.fixture(scope="module", params=["native", "sdpa", "two ranks"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    if request.param == "two ranks":
        folder = tmp_path_factory.mktemp("model")
        random_checkpoint(folder, "llama")
        engine = ranks(folder, 2, blocks=256, compiled=True)
    else:
        engine = engine_of(tmp_path_factory, "llama", attention=request.param)
    yield engine
    engine.close()


@dataclass
class Told:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None


class Driver:
    """Launches up to two steps, and collects them in order."""

    def __init__(self, engine: Engine, *, ahead: bool) -> None:
        self.engine, self.ahead = engine, ahead
        self.scheduler: DecodeScheduler = decoder(engine)
        self.told: dict[str, Told] = {}
        self.launched, self.behind = 0, 0
        self._in_flight: deque[Flight] = deque()
        self._before: Flight | None = None

    def add(self, request: RequestSpec) -> None:
        self.told[request.key.request_id] = Told()
        self._hear(self.scheduler.handle(Generate(spec=request), 0))

    def turn(self) -> bool:
        if not self._in_flight:
            self._launch(self.scheduler.handle(StepWanted(), 0))
        if self.ahead and self._in_flight:
            launched = self.launched
            self._launch(self.scheduler.handle(OverlapStepWanted(), 0))
            self.behind += self.launched - launched
        if not self._in_flight:
            return False
        outcome = self._in_flight.popleft().collect()
        self._hear(self.scheduler.handle(StepDone(outcome=outcome, seconds=0.1), 0))
        return True

    def _launch(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, RunStep):
                for pairs in command.copies:
                    self.engine.copy_blocks(pairs)
                self._before = self.engine.launch(command.batch, None, self._before)
                self._in_flight.append(self._before)
                self.launched += 1
        self._hear(commands)

    def _hear(self, commands: list[Command]) -> None:
        for command in commands:
            for event in command.events if isinstance(command, Emit) else ():
                if isinstance(event, Tokens):
                    told = self.told[event.key.request_id]
                    told.ids += event.token_ids
                    told.logprobs += event.logprobs
                    told.reason = event.finish_reason


def requests(samplings: Sequence[Sampling]) -> list[RequestSpec]:
    letters = random.Random(5)
    return [
        RequestSpec(
            key=RequestKey(str(i), 0),
            prompt_ids=tuple(letters.randrange(2, VOCAB_SIZE) for _ in range(9 + 13 * i)),
            sampling=replace(sampling, max_tokens=TOKENS - i, seed=i),
        )
        for i, sampling in enumerate(samplings)
    ]


def run(engine: Engine, asked: Sequence[RequestSpec], *, ahead: bool) -> Driver:
    """Each but the first two comes three steps after the one before."""
    driver = Driver(engine, ahead=ahead)
    for i, request in enumerate(asked):
        driver.add(request)
        for _ in range(3 if i else 0):
            driver.turn()
    while driver.turn():
        pass
    assert not list(driver.scheduler.reservations.tables.held())
    return driver


def stopping(samplings: Sequence[Sampling]) -> list[Sampling]:
    """Every second one ends somewhere."""
    return [replace(s, stop_token_ids=STOPS[::9]) if i % 2 else s for i, s in enumerate(samplings)]


def test_what_needs_no_earlier_tokens_is_launched_ahead(loaded: Engine) -> None:
    asked = requests(stopping([SAMPLINGS[name] for name in AHEAD] * 2))
    plain, ahead = (run(loaded, asked, ahead=flag) for flag in (False, True))
    assert ahead.told == plain.told
    assert {told.reason for told in ahead.told.values()} == {"length", "stop"}
    assert ahead.behind > ahead.launched / 3
    assert any(told.logprobs for told in ahead.told.values())


def test_among_others_the_order_is_the_plain_one(loaded: Engine) -> None:
    asked = requests([*SAMPLINGS.values()])
    plain, ahead = (run(loaded, asked, ahead=flag) for flag in (False, True))
    assert ahead.told == plain.told
    assert 0 < ahead.behind < ahead.launched / 3


def test_hot_draws_are_launched_ahead_too(loaded: Engine) -> None:
    hot = Sampling(max_tokens=TOKENS, seed=1, temperature=1.5)
    asked = requests([hot, replace(hot, logprobs=2), replace(hot, top_p=0.9), hot])
    plain, ahead = (run(loaded, asked, ahead=flag) for flag in (False, True))
    assert ahead.told == plain.told
    assert ahead.behind > 20


def test_each_index_has_its_own_draw(loaded: Engine) -> None:
    hot = Sampling(max_tokens=9, seed=1, temperature=50.0)
    piece = SequenceSlice(
        key=RequestKey("a", 0),
        choice=0,
        token_ids=(2, 3),
        start=0,
        tables=((BlockId(0),),) * len(loaded.layout.groups),
        samples=(SampleRequest(sampling=hot, choice=0, prompt_ids=(), emitted_ids=()),),
    )
    slices = [replace(piece, index=index) for index in range(9)]
    drawn = [loaded.run(StepBatch(slices=(one,))).sampled[0] for one in slices]
    assert len({one.token_id for (one,) in drawn}) > 3


def test_few_blocks_and_steps_ahead(loaded: Engine) -> None:
    asked = requests([SAMPLINGS["greedy"]] * 6)
    plain = run(loaded, asked, ahead=False)
    assert plain.scheduler.batch.running_set.preemptions == 0
    driver = Driver(loaded, ahead=True)
    tables = driver.scheduler.reservations.tables
    taken = tables.free_blocks - 22
    assert tables.try_open(Holder("other", RequestKey("x", 0)), 16 * taken, now_s=0) is not None
    for request in asked:
        driver.add(request)
    while driver.turn():
        pass
    assert driver.scheduler.batch.running_set.preemptions > 0 and driver.behind > 0
    assert driver.told == plain.told
