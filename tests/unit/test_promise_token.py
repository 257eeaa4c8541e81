"""A promise travels with its client: signed, and good for one request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.carried.continuation import Ticket
from router.carried.promise_token import PromiseToken
from router.carried.signing import ClusterKey
from router.core.promises.work import Promised, ToldPromise
from router.core.state.generation import GenerationRequest
from tests.unit.router_kit import request

KEY = ClusterKey(b"secret")
TOLD = ToldPromise(
    promise_id=2**62 + 1,
    due_in_s=2.5,
    work=Promised(prefill_s=1, sequences=2, kv_tokens=300),
    again=True,
)
ASKED = replace(request("r"), qos_tier="gold", tenant="t")


def sent_back(signed: bytes, asked: GenerationRequest, now_s: float) -> ToldPromise | None:
    token = KEY.open(PromiseToken, signed)
    return None if token is None else token.told_to(asked, now_s)


def test_it_comes_back_as_it_was_and_nearer() -> None:
    signed = KEY.sign(PromiseToken.of(ASKED, TOLD, now_s=1000.0))
    again = replace(ASKED, request_id="another")
    assert sent_back(signed, again, 1002.0) == replace(TOLD, due_in_s=0.5)


@pytest.mark.parametrize(
    "other",
    [
        replace(ASKED, prompt_ids=(9,)),
        replace(ASKED, tenant="u"),
        replace(ASKED, qos_tier="free"),
        replace(ASKED, sampling=replace(ASKED.sampling, max_tokens=999)),
        replace(ASKED, sampling=replace(ASKED.sampling, n=2)),
    ],
)
def test_it_is_good_for_no_other_request(other: GenerationRequest) -> None:
    signed = KEY.sign(PromiseToken.of(ASKED, TOLD, now_s=0.0))
    assert sent_back(signed, other, 2.5) is None


def test_nobody_makes_or_changes_one_without_the_secret() -> None:
    token = PromiseToken.of(ASKED, TOLD, now_s=0.0)
    assert sent_back(ClusterKey(b"guessed").sign(token), ASKED, 2.5) is None
    assert sent_back(KEY.sign(token).replace(b"gold", b"bold"), ASKED, 2.5) is None
    assert sent_back(b"", ASKED, 2.5) is None


def test_one_kind_of_signed_value_is_not_taken_for_another() -> None:
    ticket = Ticket.of("r", (1, 2, 3), "gold", "f00d", until_s=100.0)
    assert KEY.open(PromiseToken, KEY.sign(ticket)) is None
    assert KEY.open(Ticket, KEY.sign(PromiseToken.of(ASKED, TOLD, now_s=0.0))) is None
