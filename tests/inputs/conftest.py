"""One router for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.inputs.serving import serving
from tests.integration.faces_kit import Served


@pytest.fixture(scope="module", name="server")
def a_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("checkpoint")) as server:
        yield server
