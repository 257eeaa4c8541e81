"""What is launched behind what: driven through a worker's loop, whose engine says 7."""

from __future__ import annotations

import pytest

from cluster.core.worker.events import RouterLost
from kvrelay.messages import Tokens
from tests.unit.test_worker_loop import TIMES, Harness, generate, prefill
from tests.unit.worker_kit import key, spec


def ids(worker: Harness) -> list[list[str]]:
    """# of each step on the device: its requests"""
    return [[one.key.request_id for one in batch.slices] for batch in worker.device.launched]


def end_step(worker: Harness) -> None:
    worker.inbox.put(worker.device.end_step())
    worker.loop.turn()


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_chunk_is_launched_behind_a_chunk(launches_ahead: bool) -> None:
    worker = Harness(launches_ahead=launches_ahead, prompt_steps=2)
    stream = worker.router()
    worker.say(stream, prefill(spec("a", 15)))
    worker.loop.turn()
    assert ids(worker) == [["a"], ["a"]]
    assert worker.core.stepping is worker.core.prefill
    end_step(worker)
    assert ids(worker) == [["a"]] and worker.core.stepping is worker.core.prefill
    end_step(worker)
    assert worker.core.stepping is None
    assert [e.token_ids for e in stream.heard if isinstance(e, Tokens)] == [(7,)]


def test_without_it_chunks_come_one_by_one() -> None:
    worker = Harness(launches_ahead=True)
    worker.say(worker.router(), prefill(spec("a", 15)))
    worker.loop.turn()
    assert ids(worker) == [["a"]]


def test_decode_has_its_turn_after_the_chunks_that_are_launched() -> None:
    worker = Harness(launches_ahead=True, prompt_steps=2)
    stream = worker.router()
    worker.say(stream, prefill(spec("a", 23)))
    worker.loop.turn()
    worker.say(stream, generate("d", max_tokens=4))
    worker.loop.turn()
    assert ids(worker) == [["a"], ["a"]]
    end_step(worker)
    assert ids(worker) == [["a"]], "nothing is launched behind it: decode has work"
    end_step(worker)
    assert ids(worker) == [["d"]], "nothing is launched behind it: a prompt waits"
    end_step(worker)
    assert ids(worker) == [["a"]]


def learnt(*, prompt_steps: int) -> float:
    """The correction after three steps that took twice as long as predicted."""
    now_s = [0.0]
    worker = Harness(lambda: now_s[0], prompt_steps=prompt_steps)
    worker.say(worker.router(), prefill(spec("a", 24)))
    worker.loop.turn()
    while worker.device.launched:
        assert worker.pace.work == worker.device.launched[0].work
        now_s[0] += 2 * TIMES.step_s(worker.device.launched[0].work)
        end_step(worker)
    return worker.pace.prefill.factor


def test_of_two_chunks_the_second_begins_when_the_first_has_ended() -> None:
    """So what is learnt of their times is the same."""
    assert learnt(prompt_steps=2) == learnt(prompt_steps=1) > 1.3


def test_a_router_that_is_gone_takes_its_prompt_along_when_both_steps_have_ended() -> None:
    worker = Harness(prompt_steps=2)
    stream = worker.router()
    worker.say(stream, prefill(spec("a", 15)))
    worker.loop.turn()
    worker.inbox.put(RouterLost(stream))
    worker.loop.turn()
    assert ids(worker) == [["a"], ["a"]]
    end_step(worker)
    assert key("a") in worker.core.prefill.jobs
    end_step(worker)
    assert worker.core.idle and worker.decode_tables.free_blocks == worker.decode_tables.blocks
