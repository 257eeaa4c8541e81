"""Which router a client asks next."""

from __future__ import annotations

import pytest

from kvrelay.client.routers import Routers
from kvrelay.errors import KvrelayError, Refused, RequestFailedError

GONE = RequestFailedError("unavailable", "connection refused")
STOPS = Refused("draining", "this router is stopping", retry_after_s=1.0)


@pytest.mark.parametrize("error", [GONE, STOPS], ids=["gone", "stops"])
def test_another_router_may_serve(error: KvrelayError) -> None:
    routers = Routers(["a", "b", "c"])
    tour = routers.tour()
    assert [tour.try_next(error), tour.stub] == [True, "b"]
    assert [tour.try_next(error), tour.stub] == [True, "c"]
    assert not tour.try_next(error), "each once"
    assert routers.tour().stub == "c", "the next request begins where this one ended"


@pytest.mark.parametrize(
    "error",
    [
        Refused("ttft_unreachable", "too late", retry_after_s=1.0),
        Refused("slots_exhausted", "full", retry_after_s=1.0),
        RequestFailedError("internal", "broken"),
    ],
)
def test_what_every_router_would_say_is_final(error: KvrelayError) -> None:
    assert not Routers(["a", "b"]).tour().try_next(error)


def test_a_router_may_end_only_what_another_one_can_go_on_with() -> None:
    alone, tour = Routers(["a"]).tour(), Routers(["a", "b"]).tour()
    assert not alone.can_go_on(has_begun=False) and not alone.can_go_on(has_begun=True)
    assert tour.can_go_on(has_begun=False)
    assert tour.try_next(STOPS)
    assert not tour.can_go_on(has_begun=False), "both have been asked"
    assert tour.can_go_on(has_begun=True), "a stream that has begun asks them again"
