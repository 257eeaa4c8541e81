"""Limits of the product, as small as everything is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from kvpool.core.transfer import piece
from router.core import migration, request


@contextmanager
def small() -> Iterator[None]:
    """The last chunk leaves in layer groups, and short answers move. Faults come a hundred times as
    often as anywhere else, so that a request may meet many of them."""
    with ExitStack() as stack:
        for module, name, value in (
            (piece, "LAYER_GROUP_BYTES", 1),
            (migration, "FEWEST_LEFT_TOKENS", 4),
            (migration, "WORTH", 4.0),
            (migration, "LOOK_S", 0.02),
            (request, "MAX_ATTEMPTS", 100),
            (request, "MOST_DEATHS", 100),
        ):
            stack.enter_context(patch.object(module, name, value))
        piece.cut_span.cache_clear()
        yield
    piece.cut_span.cache_clear()
