import pytest

from kvpool.transport.rdma import nixl
from kvpool.transport.rdma.nixl import Waiting
from kvrelay.errors import PeerError


def gone() -> None:
    raise PeerError("the peer is gone")


@pytest.mark.parametrize("idle", [True, False])
def test_a_transfer_that_lasts_asks_for_its_peer(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Waiting(gone)
    one.again(idle=idle)
    monkeypatch.setattr(nixl, "_GRACE_S", 0.0)
    with pytest.raises(PeerError, match="gone"):
        one.again(idle=idle)


def test_who_has_waited_long_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(nixl.time, "sleep", slept.append)
    one = Waiting(lambda: None)
    monkeypatch.setattr(nixl, "_YIELD_S", 0.0)
    one.again(idle=False)
    assert not slept, "what moves on is not slept through"
    one.again()
    assert len(slept) == 1
