"""The proxy in a thread of the test's process, on a free port, and ways to call it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import uvicorn

from client.openai.app import create_app
from client.openai.connections import ImpatientProtocol
from client.openai.settings import ApiKeys, ProxySettings

MODEL = "deepseek_v41"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextlib.contextmanager
def serving(deployment: str, keys: tuple[str, ...] = (), **changes: Any) -> Iterator[str]:
    """host:port; `changes` as in ProxySettings. Leaving it gives running answers a second."""
    app = create_app(ProxySettings(deployment, **changes), ApiKeys(keys))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, http=ImpatientProtocol, ws="none", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(api: openai.OpenAI, text: str, **options: Any) -> Any:
    return api.chat.completions.create(model=MODEL, messages=user(text), **options)


def post(
    address: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON body; `body` is sent as JSON unless it is bytes."""
    status, got, text = _exchange(address, path, body, headers or {})
    return status, got, json.loads(text) if text else None


def raw(address: str, path: str, body: Any) -> str:
    """The whole answer as text."""
    return _exchange(address, path, body, {})[2]


def _exchange(
    address: str, path: str, body: Any, headers: dict[str, str]
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=20)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, sent, {"Content-Type": "application/json", **headers})
    with connection.getresponse() as response:
        text = response.read().decode()
        got = {name.lower(): value for name, value in response.getheaders()}
    connection.close()
    return response.status, got, text


def get(address: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    return _ask("GET", address, path, headers)


def options(address: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """What a browser asks before a page of another origin may call."""
    return _ask("OPTIONS", address, path, headers)


def _ask(
    method: str, address: str, path: str, headers: dict[str, str]
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request(method, path, headers=headers)
    with connection.getresponse() as response:
        read = response.read().decode()
        got = {name.lower(): value for name, value in response.getheaders()}
    connection.close()
    return response.status, got, read
