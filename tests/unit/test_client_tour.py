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
