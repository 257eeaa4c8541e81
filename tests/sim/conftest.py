from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.core.transfer import piece


@pytest.fixture(autouse=True)
def layer_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The last chunk leaves in layer groups, small as everything is here."""
    monkeypatch.setattr(piece, "LAYER_GROUP_BYTES", 1)
    piece.cut_span.cache_clear()
    yield
    piece.cut_span.cache_clear()
