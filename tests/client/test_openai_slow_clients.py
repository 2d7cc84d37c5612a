"""Clients of the proxy that neither read nor send, before the real Triton server with the echo
model."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from client.openai import connections
from tests.client.openai_proxy import CHAT, COMPLETIONS, MODEL, get, post, serving, user
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


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_client_that_sends_no_head_is_cut(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, half a head, and half a head behind an answer; long answers are let alone."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    asked = {"model": MODEL, "messages": user("[slow]" + "a" * 20)}
    body = json.dumps(asked)
    whole = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with serving(server.grpc) as proxy:
        port = int(proxy.split(":")[1])
        for sent in (b"", HEAD.encode(), whole, whole + HEAD.encode()):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(sent)
                said = b"".join(iter(lambda: client.recv(65536), b""))
            assert said.startswith(b"HTTP/1.1 200") == sent.startswith(whole)


def test_a_client_that_leaves_in_its_body_leaves_no_trace(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them wrote a page of the library's insides into the log."""
    with serving(server.grpc) as proxy:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", int(proxy.split(":")[1]))) as client:
                client.sendall(f"{HEAD}Content-Length: 9\r\n\r\n{{".encode())
        deadline = time.monotonic() + 10
        left = 'dsv41_proxy_requests_total{path="/v1/chat/completions",status="499"} 20.0'
        while left not in get(proxy, "/metrics")[2]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
