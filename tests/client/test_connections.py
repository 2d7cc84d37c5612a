"""Connections of the clients and the proxy to others."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from client.commands.openai_proxy import _listen
from client.grpc import CHANNEL_OPTIONS


def test_the_proxy_sends_small_answers_at_once() -> None:
    """Nagle's algorithm would hold a token until the client acknowledged the one before."""
    with (
        _listen("127.0.0.1", 0, 60) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_server_that_comes_back_is_found_soon() -> None:
    """gRPC by itself would try after 1, 2.6, 5.2 and 9.3 seconds, a fifth more or less."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        ready = grpc.channel_ready_future(channel)
        time.sleep(6.2)
        server = grpc.server(ThreadPoolExecutor(1))
        assert server.add_insecure_port(address)
        server.start()
        try:
            ready.result(timeout=1.6)
        finally:
            server.stop(None)
