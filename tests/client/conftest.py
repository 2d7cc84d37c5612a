"""The real Triton server with the echo model of `fixture_repository`, once for all client tests."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.client.openai_proxy import serving
from tests.client.real_server import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[str]:
    with serving(server.grpc) as address:
        yield address


@pytest.fixture(scope="module")
def api(proxy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{proxy}/v1", api_key="none", max_retries=0) as client:
        yield client
