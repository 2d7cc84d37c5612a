"""Clients that do not read: their requests end, and what they leave in memory is bounded."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from python_backend.host.slow_readers import cut_slow_readers
from tests.client import real_server
from tests.server.deployment import PROMPT, ROOT, Deployment

pytestmark = pytest.mark.server

MUCH = 200_000  # tokens of the echo model, 12,000 a second; an event takes about 150 bytes


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[real_server.Server]:
    with real_server.running(tmp_path) as server:
        yield server


def test_an_http_client_that_does_not_read_is_cut(echo: real_server.Server) -> None:
    host, port = echo.http.split(":")
    (process,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if any(c.laddr.port == int(port) for c in child.net_connections("tcp"))
        and child.name() == "tritonserver"
    ]
    cut_slow_readers(process, int(port), 0.5)
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.connect((host, int(port)))
    unread.sendall(_request(MUCH))
    deadline = time.monotonic() + 20
    made = -1.0
    while (before := echo.tokens_made()) != made:
        assert time.monotonic() < deadline, "the server still makes tokens"
        made = before
        time.sleep(0.3)
    assert 0 < made < MUCH
    # Whoever reads gets all.
    assert len(_events(host, int(port), 500)) == 500
    unread.close()


def _events(host: str, port: int, count: int) -> list[bytes]:
    with socket.create_connection((host, port)) as reading:
        reading.sendall(_request(count))
        said = b"".join(iter(lambda: reading.recv(65536), b""))
    return [line for line in said.splitlines() if line.startswith(b"data: ")]


def _request(count: int) -> bytes:
    body = json.dumps({"input_ids": [65], "max_tokens": count, "stream": True}).encode()
    head = ("POST /v2/models/deepseek_v41/generate_stream HTTP/1.1", "Host: x", "Connection: close")
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def test_a_stopped_grpc_client_is_cut(engine: Path) -> None:
    """Its process is frozen in mid-stream, as one on a host that hangs."""
    server = Deployment(engine, "--slow-reader-seconds=1")
    try:
        server.wait_until_ready()
        assert not any("are not cut" in line for line in server.said)
        client = subprocess.Popen(
            [
                *(sys.executable, "-c"),
                "import sys; from tests.server.deployment import GrpcStream\n"
                f"values = dict(input_ids={PROMPT}, max_tokens=900, end_id=-1, stream=True,"
                " num_return_sequences=16)\n"
                f"for _ in GrpcStream({server.grpc}, 'frozen', values, {{}}): print(flush=True)",
            ],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert client.stdout
        assert client.stdout.readline()
        client.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 15
        while not (ended := server.events("request_finished")[1:]):
            assert time.monotonic() < deadline, "the frozen client's request still runs"
            time.sleep(0.1)
        assert (ended[0]["request_id"], ended[0]["finish_reason"]) == ("frozen", "cancelled")
        assert server.seconds_until_empty(2) < 2
        client.kill()
        client.wait()
    finally:
        server.end()
