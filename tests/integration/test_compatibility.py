"""The compatibility page tells the truth, and what agent SDKs send by default is served."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from tests.compatibility import CALLS, PAGE, SENT, State, fields_sent, page
from tests.integration.agents_kit import agent_folder as agent_folder
from tests.integration.agents_kit import saying
from tests.integration.faces_kit import MODEL, in_loop, served


def test_the_page_says_what_bodies_accept() -> None:
    assert PAGE.read_text() == page(), "renew it: python -m tests.compatibility"


@pytest.mark.parametrize("kind", CALLS)
def test_no_field_of_others_is_unknown(kind: str) -> None:
    call = CALLS[kind]
    theirs = frozenset().union(*call.theirs.values())
    assert not theirs - call.ours - call.neutral.keys()


@pytest.mark.parametrize("kind", CALLS)
def test_no_refused_field_is_sent_by_default(kind: str) -> None:
    call = CALLS[kind]
    for sdk, names in fields_sent(call.path).items():
        refused = {name for name in names if call.state(name) is State.REFUSED}
        assert not refused, f"{sdk} sends {refused} to {call.path}"


@pytest.mark.parametrize("sdk", SENT)
@in_loop
async def test_each_recorded_request_is_served(sdk: str, folder: Path) -> None:
    """Values too, at every depth. What is kept between requests has another id here."""
    async with served(folder, saying(folder, '{"city": "Rome"}')) as s, s.http() as client:
        first = await client.post("/v1/responses", json={"input": "Which?", "model": MODEL})
        assert first.status_code == 200, first.text
        for request in SENT[sdk]["requests"]:
            body = deepcopy(request["body"]) | {"model": MODEL}
            if "previous_response_id" in body:
                body["previous_response_id"] = first.json()["id"]
            answer = await client.post(request["path"], json=body)
            assert answer.status_code == 200, (request, answer.text)
            assert '"error":{' not in answer.text.replace(" ", ""), answer.text


@in_loop
async def test_responses_take_vllms_sampling_fields(folder: Path) -> None:
    asked = {
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 2.0},
        "ignore_eos": True,
        "stop": "Rome",
        "stop_token_ids": [9],
    }
    async with served(folder, saying(folder, "It is in Rome.")) as s, s.http() as client:
        body = {"input": "Which?", "model": MODEL, **asked}
        answer = (await client.post("/v1/responses", json=body)).json()
        assert answer["output"][-1]["content"][0]["text"] == "It is in "
        sampling = s.dispatcher.requests[-1].sampling
    assert (sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty) == (
        0.1,
        0.2,
        0.3,
    )
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, ((7, 2.0),))
    assert 9 in sampling.stop_token_ids and 0 not in sampling.stop_token_ids, "no end of sequence"
