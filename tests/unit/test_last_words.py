"""A worker's last step and the reason of its end, as another process reads them after its death."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from cluster.core.worker.last_words import (
    END_BYTES,
    PAGE_BYTES,
    SLOT_BYTES,
    LastStep,
    Page,
    StepEntry,
    WorkerEnd,
    packed,
)
from cluster.worker.last_words import LastWords, StepNotes, key_of
from cluster.worker.watchdog import EXIT_HUNG_STEP
from engine.core.step import RunStep, SequenceSlice, StepBatch
from kvrelay.errors import PeerError
from kvrelay.messages import Abort
from kvrelay.types import RequestKey


def page() -> Page:
    return Page(memoryview(bytearray(PAGE_BYTES)))


def entries(rng: random.Random, most: int = 64) -> tuple[StepEntry, ...]:
    return tuple(
        StepEntry("é" * rng.randrange(120) + str(i), rng.randrange(2**32), rng.randrange(4))
        for i in range(rng.randrange(most))
    )


def test_the_latest_step_is_read() -> None:
    one, rng = page(), random.Random(1)
    assert one.read_step() == LastStep()
    for _ in range(50):
        step = entries(rng)
        one.write_step(map(packed, step))
        assert one.read_step() == LastStep(entries=step)
    assert one.read_end() == (WorkerEnd.LIVES, "")


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_was_half_written_does_not_count(seed: int) -> None:
    """Whatever part of the write had reached the page, one of the two steps is read whole."""
    rng = random.Random(seed)
    for _ in range(20):
        before, one = page(), page()
        steps = [entries(rng) for _ in range(rng.randrange(1, 5))]
        for step in steps:
            before.write_step(map(packed, step))
            one.write_step(map(packed, step))
        latest = entries(rng)
        one.write_step(map(packed, latest))
        torn = bytearray(one.buffer)
        whole = [*range(END_BYTES, END_BYTES + 9000), *range(END_BYTES + SLOT_BYTES, PAGE_BYTES)]
        changed = [i for i in whole[:18000] if one.buffer[i] != before.buffer[i]]
        for i in changed[rng.randrange(len(changed) + 1) :]:
            torn[i] = before.buffer[i]
        read = Page(memoryview(torn)).read_step().entries
        assert read in (steps[-1], latest), "neither of them"


def test_what_does_not_fit_is_told() -> None:
    one = page()
    many = [StepEntry("x" * 1024, i, 0) for i in range(SLOT_BYTES // 1000)]
    one.write_step(map(packed, many))
    step = one.read_step()
    assert not step.complete
    assert 0 < len(step.entries) < len(many) and step.entries == (*many[: len(step.entries)],)
    one.write_step(map(packed, many[:3]))
    assert one.read_step() == LastStep(entries=tuple(many[:3]))


def test_the_first_end_counts_and_is_bounded() -> None:
    one = page()
    one.write_end(WorkerEnd.CRASHED, "é" * END_BYTES)
    one.write_end(WorkerEnd.CLOSED)
    end, why = one.read_end()
    assert end is WorkerEnd.CRASHED and why.startswith("ééé") and len(why) < END_BYTES


def step(*names: str) -> RunStep:
    slices = [
        SequenceSlice(key=RequestKey(n, 7), choice=0, token_ids=(1,), start=0, tables=())
        for n in names
    ]
    return RunStep(batch=StepBatch(slices=tuple(slices)))


def test_the_page_has_all_steps_in_flight_and_no_others() -> None:
    one = page()
    notes = StepNotes(one)

    def shown() -> set[str]:
        return {entry.request_id for entry in one.read_step().entries}

    notes.launched(step("a", "b"))
    notes.launched(step("b", "c"))
    assert shown() == {"a", "b", "c"}
    notes.ended()
    notes.launched(step("b", "c"))
    assert shown() == {"b", "c"}
    notes.ended()
    notes.ended()
    assert shown() == {"b", "c"}, "an end changes nothing"
    notes.launched(step("d"))
    assert shown() == {"d"}


def test_what_an_event_was_about() -> None:
    class FromSomebody:
        message = Abort(key=RequestKey("r", 3))

    assert key_of(FromSomebody()) == RequestKey("r", 3)
    assert key_of(None) is None and key_of(step("a")) is None


# --- with real processes --------------------------------------------------------------------------


def ask(address: str, key: str) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(key.encode())
        answer = b""
        while data := connection.recv(4096):
            answer += data
        return answer


def closes(words: LastWords) -> None:
    words.close()
    os._exit(0)


def is_killed(words: LastWords) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults(words: LastWords) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def aborts(words: LastWords) -> None:
    os.abort()


def crashes(words: LastWords) -> None:
    words.crashed(IndexError("out of\nrange"))
    words.close()
    time.sleep(60)


def loses_a_killed_rank(words: LastWords) -> None:
    words.crashed(PeerError("rank 1 has ended with exit code -9"))
    os._exit(1)


def hangs(words: LastWords) -> None:
    words.hung("the device hangs")
    os._exit(EXIT_HUNG_STEP)


def lives(words: LastWords) -> None:
    time.sleep(60)


def run(end: Callable[[LastWords], None], told: Connection) -> None:
    words = LastWords("127.0.0.1", None)
    words.notes.launched(step("a", "b"))
    told.send((words.address, words.key))
    told.close()
    time.sleep(0.3)
    end(words)


ENDS = [
    (is_killed, WorkerEnd.KILLED, ""),
    (segfaults, WorkerEnd.FATAL_SIGNAL, "Fatal Python error: Segmentation fault"),
    (aborts, WorkerEnd.FATAL_SIGNAL, "Fatal Python error: Aborted"),
    (crashes, WorkerEnd.CRASHED, "IndexError: out of\nrange"),
    (loses_a_killed_rank, WorkerEnd.KILLED, "PeerError: rank 1 has ended with exit code -9"),
    (hangs, WorkerEnd.HUNG_STEP, "the device hangs"),
    (lives, WorkerEnd.LIVES, ""),
]


@pytest.mark.parametrize(("end", "expected", "why"), ENDS, ids=[e.__name__ for e, *_ in ENDS])
def test_the_witness_tells_how_a_worker_ended(
    end: Callable[[LastWords], None], expected: WorkerEnd, why: str
) -> None:
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    worker = context.Process(target=run, args=(end, theirs))
    worker.start()
    theirs.close()
    address, key = told.recv()
    assert ask(address, "0" * len(key)) == b"", "a stranger hears nothing"
    if end not in (crashes, lives):
        worker.join(30)
    else:
        time.sleep(0.6)
    answer = json.loads(ask(address, key))
    told = f"{expected}: {why}" if why else expected
    assert (answer["blame"], answer["why"], answer["complete"]) == (expected.blame, told, True)
    assert answer["step"] == [["a", 7, 0], ["b", 7, 0]]
    worker.kill()
    worker.join(30)


def test_nobody_is_left_when_a_worker_was_closed() -> None:
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    worker = context.Process(target=run, args=(closes, theirs))
    worker.start()
    theirs.close()
    address, key = told.recv()
    worker.join(30)
    with pytest.raises(ConnectionRefusedError):
        ask(address, key)
