"""Which of several routers a client talks to."""

from __future__ import annotations

import grpc
import pytest

from kvrelay.client.routers import Routers, addresses_of, is_gone
from kvrelay.errors import InvalidRequest, KvrelayError, Refused, RequestFailedError
from kvrelay.status import error_of

GONE = RequestFailedError("unavailable", "connection refused")


def test_each_router_is_tried_once_and_the_last_one_is_kept() -> None:
    routers = Routers("abc")
    tour = routers.tour()
    assert tour.stub == "a"
    assert tour.try_next(GONE) and tour.stub == "b"
    assert routers.tour().stub == "b"
    later = routers.tour()
    assert [later.try_next(GONE), later.stub] == [True, "c"]
    assert [later.try_next(GONE), later.stub] == [True, "a"]
    assert not later.try_next(GONE)
    assert routers.tour().stub == "a"


@pytest.mark.parametrize(
    "error",
    [
        RequestFailedError("worker_lost", "it was there, and admitted"),
        RequestFailedError("deadline_exceeded", "too late anywhere"),
        Refused("no_capacity", "come back", retry_after_s=1.0),
        InvalidRequest("wrong everywhere"),
    ],
)
def test_what_a_router_says_itself_leads_to_no_other(error: KvrelayError) -> None:
    tour = Routers("ab").tour()
    assert not tour.try_next(error)
    assert tour.stub == "a"


def test_a_connection_whose_ping_timed_out_is_a_lost_router() -> None:
    unknown = grpc.StatusCode.UNKNOWN
    assert is_gone(error_of(unknown, "Stream removed (ping timeout)", ()))
    assert not is_gone(error_of(unknown, "Exception calling application", ()))


def test_addresses() -> None:
    assert addresses_of("a:1") == ("a:1",)
    assert addresses_of(["a:1", "b:1"]) == ("a:1", "b:1")
    with pytest.raises(ValueError, match="at least one HOST:PORT"):
        addresses_of([])
