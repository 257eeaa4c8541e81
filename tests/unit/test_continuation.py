"""A request that goes on at another router, behind what the first has delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.client.going_on import NO_WORKER_FOR_S, RECONNECT_EVERY_S, RECONNECT_FOR_S, SoFar
from kvrelay.errors import InvalidRequest, Refused, RequestFailedError
from kvrelay.v1 import inference_pb2 as pb
from router.carried.continuation import Continuation, Delivered, Ticket
from router.carried.signing import ClusterKey

KEY = ClusterKey(b"secret")
GONE = RequestFailedError("unavailable", "gone")
EARLY = Refused("no_capacity", "no worker has joined yet", retry_after_s=1.0)
TICKET = Ticket.of("r", (1, 2, 3), "gold", "f00d", until_s=100.0)


def asked(prompt: tuple[int, ...] = (1, 2, 3), tier: str = "gold", at_s: float = 99.0) -> Ticket:
    return Ticket.of("another", prompt, tier, "f00d", until_s=at_s)


# --- tickets ------------------------------------------------------------------------------------


def test_a_ticket_admits_its_request_alone() -> None:
    ticket = KEY.open(Ticket, KEY.sign(TICKET))
    assert ticket == TICKET
    assert ticket.admits(asked())
    assert not ticket.admits(asked(prompt=(1, 2, 4)))
    assert not ticket.admits(asked(tier="platinum"))
    assert not ticket.admits(asked(at_s=100.0)), "it is too old"


def test_a_ticket_admits_no_more_than_was_admitted() -> None:
    ticket = replace(TICKET, n=2, max_tokens=64)
    capped = replace(asked(), n=2, max_tokens=32)
    assert ticket.admits(capped)
    assert not ticket.admits(replace(capped, max_tokens=65))
    assert not ticket.admits(replace(capped, n=3))


def test_a_ticket_for_another_model_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="another model"):
        TICKET.admits(replace(asked(), fingerprint="beef"))


@pytest.mark.parametrize("forged", [b"", b"x", ClusterKey(b"guessed").sign(TICKET)])
def test_nobody_makes_a_ticket_without_the_secret(forged: bytes) -> None:
    assert KEY.open(Ticket, forged) is None


@pytest.mark.parametrize("told", [b"", b"[]", b'{"a": 1}', b"\xff", b"7"])
def test_what_is_signed_and_no_ticket_is_none(told: bytes) -> None:
    assert KEY.open(Ticket, KEY._mac(Ticket, told) + told) is None


def test_a_ticket_of_other_types_is_none() -> None:
    told = KEY.sign(TICKET)[32:].replace(b"100.0", b'"soon"')
    assert KEY.open(Ticket, KEY._mac(Ticket, told) + told) is None


def test_a_changed_ticket_is_none() -> None:
    signed = KEY.sign(TICKET)
    assert KEY.open(Ticket, signed.replace(b"gold", b"bold")) is None


# --- what a client sends ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ([Delivered(token_ids=(5,))], "n is 2"),
        ([Delivered(token_ids=(5,), finished=True)] * 2, "finished"),
        ([Delivered(token_ids=(5,) * 8)] * 2, "8 tokens or more"),
        ([Delivered(token_ids=(300,))] * 2, "vocabulary"),
    ],
)
def test_what_cannot_be_continued_is_refused(choices: list[Delivered], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Continuation(choices=tuple(choices)).check(2, 8, 300)


# --- the client ---------------------------------------------------------------------------------


def chunk(index: int, *ids: int, end: str = "", ticket: bytes = b"") -> pb.GenerateResponse:
    return pb.GenerateResponse(
        index=index, token_ids=ids, finish_reason=end, seed=7, ticket=ticket, capped_tokens=64
    )


def test_a_client_sends_what_it_has_of_each_choice() -> None:
    so_far, request = SoFar(routers=2), pb.GenerateRequest()
    request.sampling_params.n, request.sampling_params.prompt_logprobs = 3, 1
    for one in (chunk(0, 1, ticket=b"t"), chunk(2, 5, 6), chunk(0, 2, end="stop")):
        so_far.add(one)
    assert not so_far.is_whole(request)
    so_far.go_on(request)
    told = request.continuation
    assert [(list(c.token_ids), c.finished) for c in told.choices] == [
        ([1, 2], True),
        ([], False),
        ([5, 6], False),
    ]
    assert told.ticket == b"t"
    sampling = request.sampling_params
    assert (sampling.seed, sampling.max_tokens) == (7, 64)
    assert not sampling.HasField("prompt_logprobs"), "they have come"
    so_far.add(chunk(1, 9, end="length"))
    so_far.add(chunk(2, 7, end="length"))
    assert so_far.is_whole(request)


def test_what_has_not_begun_is_not_whole() -> None:
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(n=0))
    assert not SoFar(routers=1).is_whole(request)


def test_all_routers_are_asked_at_once_and_then_again_for_a_while() -> None:
    so_far = SoFar(routers=3)
    assert [so_far.delay_s(GONE, 5.0) for _ in range(3)] == [0.0, 0.0, RECONNECT_EVERY_S]
    assert so_far.delay_s(GONE, 5.0 + RECONNECT_FOR_S) is None
    so_far.add(chunk(0, 1))
    assert so_far.delay_s(GONE, 50.0) == 0.0, "it went on in between"
    assert so_far.delay_s(EARLY, 50.0) == 0.0
    assert so_far.delay_s(InvalidRequest("another model"), 50.0) is None


def test_a_router_without_workers_is_asked_for_as_long_as_it_waits_itself() -> None:
    so_far = SoFar(routers=1)
    assert so_far.delay_s(GONE, 5.0) == RECONNECT_EVERY_S
    for at_s in (14.0, 5.0 + NO_WORKER_FOR_S - 1.0):
        assert so_far.delay_s(EARLY, at_s) == RECONNECT_EVERY_S
    assert so_far.delay_s(GONE, at_s + 0.5) == RECONNECT_EVERY_S, "it has answered lately"
    assert so_far.delay_s(EARLY, 5.0 + NO_WORKER_FOR_S) is None


def test_a_router_that_had_no_workers_may_be_gone_after_all() -> None:
    so_far = SoFar(routers=1)
    so_far.delay_s(EARLY, 5.0)
    assert so_far.delay_s(EARLY, 60.0) == RECONNECT_EVERY_S
    assert so_far.delay_s(GONE, 60.0 + RECONNECT_FOR_S) is None


def test_routers_that_stand_still_leave_time_for_the_next_one() -> None:
    """Each of them is noticed only after seconds."""
    so_far = SoFar(routers=3)
    assert so_far.delay_s(GONE, 4.0) == so_far.delay_s(GONE, 10.0) == 0.0
    assert so_far.delay_s(GONE, 16.0) == RECONNECT_EVERY_S, "the first one may be back"
    assert so_far.delay_s(GONE, 16.0 + RECONNECT_FOR_S) is None
