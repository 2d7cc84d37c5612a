"""The real Triton server with the echo model of `fixture_repository`, once for all client tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.real_server import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started
