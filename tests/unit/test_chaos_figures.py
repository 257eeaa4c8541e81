"""bench.chaos: which fault may come, whose pause is whose, what is wrong, what is held."""

from __future__ import annotations

from random import Random

from bench.chaos.faults import Fault, Kind, Seen, drawn, possible
from bench.chaos.judged import pause_rows, wrong
from bench.chaos.leaks import held_in
from bench.chaos.streams import Outcome, StreamRecord
from kvrelay.v1.admin_pb2 import GetKvResponse
from kvrelay.v1.worker_pb2 import DebugKvResponse, HeldBlocks

ROLES = {
    "router-0": "router",
    "router-1": "router",
    "prefill-0": "prefill",
    "decode-0": "decode",
    "pool-0": "pool",
}


def record(number: int, came_s: list[float], answer: tuple = (), **fields: object) -> StreamRecord:
    return StreamRecord(
        number=number,
        index=0,
        request_id=f"r-{number}",
        asked_s=0.0,
        came_s=came_s,
        answer=answer,
        outcome=Outcome(str(fields.get("outcome", "completed"))),
    )


def seen(at_s: float, *, on_it: set[int], live: set[int], in_force: int = 0) -> Seen:
    return Seen(
        fault=Fault(kind=Kind.KILL, role="decode", target="decode-0"),
        at_s=at_s,
        until_s=at_s,
        live=frozenset(live),
        on_it=frozenset(on_it),
        in_force=in_force,
    )


def test_no_fault_takes_the_last_router_or_the_last_worker() -> None:
    rng = Random(3)
    for _ in range(300):
        serving = [name for name in ROLES if rng.random() < 0.6]
        fault = drawn(possible(ROLES, serving, ()), rng)
        left = [ROLES[name] for name in serving if fault is None or name != fault.target]
        if fault is not None and fault.role == "router":
            assert "router" in left
        if fault is not None and fault.role in ("prefill", "decode"):
            assert {"prefill", "decode"} & {*left}


def test_every_possible_fault_comes_and_the_seed_repeats_them() -> None:
    candidates = possible(ROLES, [*ROLES], ())
    first, second = ([drawn(candidates, rng) for _ in range(400)] for rng in (Random(7), Random(7)))
    assert first == second
    assert {*first} == {*candidates}


def test_a_pause_belongs_to_the_last_fault_before_it() -> None:
    on_it = record(0, [1.0, 9.9, 12.0, 12.1, 20.1, 24.0])
    other = record(1, [9.95, 10.2, 10.3, 30.0])
    faults = [
        seen(10.0, on_it={0}, live={0, 1}),
        seen(20.0, on_it=set(), live={0, 1}, in_force=1),
    ]
    rows = {row.whose: row for row in pause_rows([on_it, other], faults)}
    assert [round(s, 2) for s in rows["on it"].all.values_s] == [8.0]
    assert rows["on it"].alone.values_s == (), "the second fault came within the pause"
    assert [round(s, 2) for s in rows["elsewhere"].all.values_s] == [3.9, 19.7]
    assert rows["elsewhere"].alone.values_s == (), "another fault was in force"


def test_wrong_are_other_tokens_missing_ones_and_another_text() -> None:
    expected = {0: (((1, 2, 3), "abc"),)}
    right = record(0, [], (((1, 2, 3), "abc"),))
    other = record(1, [], (((1, 9, 3), "abc"),))
    short = record(2, [], (((1, 2), "ab"),))
    text = record(3, [], (((1, 2, 3), "abd"),))
    twice = record(4, [], (((1, 2, 2), ""),), outcome="failed")
    cut = record(5, [], (((1, 2), "ab"),), outcome="failed")
    found = wrong([right, other, short, text, twice, cut], expected)
    assert [one.number for one, _ in found] == [1, 2, 3, 4]


def test_what_is_held_is_told() -> None:
    idle = DebugKvResponse(worker="a", total_blocks=10, free_blocks=4, cached_blocks=6)
    assert held_in(GetKvResponse(workers=[idle])) == []
    lost = DebugKvResponse(worker="b", total_blocks=10, free_blocks=4, cached_blocks=5)
    held = DebugKvResponse(worker="c", held=[HeldBlocks(holder="x", block_ids=[1])])
    assert len(held_in(GetKvResponse(workers=[lost]))) == 1
    assert len(held_in(GetKvResponse(workers=[held]))) == 1
