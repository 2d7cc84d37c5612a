"""A client of the proxy that does not read, before the real Triton server with the echo model."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.client.openai_proxy import CHAT, COMPLETIONS, MODEL, get, post, user
from tests.client.real_server import ROOT, Server, assert_stops

pytestmark = pytest.mark.server


def test_a_client_that_does_not_read_is_cut(server: Server) -> None:
    """The answer is of 200,000 events of 0.2 KB: the proxy reads no further when the client's
    connection is full, and a second later the request ends."""
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "client.cli", "openai-proxy", "--port=0"),
            *(f"--url={server.grpc}", "--slow-reader-seconds=1"),
        ],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout
    assert running.stderr
    port = int(running.stdout.readline().split()[-1].split(":")[-1].removesuffix("/v1"))
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 200_000, "stream": True}
    body = json.dumps(asked).encode()
    head = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json")
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.connect(("127.0.0.1", port))
    lines = [*head, f"Content-Length: {len(body)}", "", ""]
    unread.sendall("\r\n".join(lines).encode() + body)
    deadline = time.monotonic() + 20
    proxy = f"127.0.0.1:{port}"
    while "dsv41_proxy_time_to_first_token_seconds_count 1" not in get(proxy, "/metrics")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while "dsv41_proxy_requests_in_flight 0.0" not in get(proxy, "/metrics")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert_stops(server)
    assert post(proxy, CHAT, {"model": MODEL, "messages": user("a")})[0] == 200
    with contextlib.suppress(ConnectionResetError):
        assert len(b"".join(iter(lambda: unread.recv(65536), b""))) < 20_000_000
    unread.close()
    running.send_signal(signal.SIGTERM)
    assert running.wait(15) == 0
    assert running.stderr.read() == ""
