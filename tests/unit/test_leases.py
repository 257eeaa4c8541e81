from __future__ import annotations

import pytest

from kvpool.core.blocks.leases import LeaseTable


def test_a_lease_ends_at_its_time_and_not_before() -> None:
    leases: LeaseTable[str] = LeaseTable(10)
    leases.grant("a", 0)
    leases.grant("b", 5)
    assert leases.expire(9.9) == ()
    assert leases.expire(10) == ("a",)
    assert "a" not in leases
    assert leases.expire(10) == ()
    assert leases.expire(99) == ("b",)
    assert len(leases) == 0


def test_progress_renews() -> None:
    leases: LeaseTable[str] = LeaseTable(10)
    leases.grant("a", 0)
    assert leases.renew("a", 8)
    assert leases.expire(17) == ()
    assert leases.expire(18) == ("a",)
    assert not leases.renew("a", 18)
    assert "a" not in leases


def test_the_owner_ends_it_early_and_may_grant_it_again() -> None:
    leases: LeaseTable[str] = LeaseTable(10)
    leases.grant("a", 0)
    with pytest.raises(AssertionError, match="a is leased already"):
        leases.grant("a", 1)
    leases.end("a")
    leases.end("a")
    leases.grant("a", 2)
    assert leases.expire(11) == ()
