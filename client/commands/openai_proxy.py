"""`dsv41-client openai-proxy`: the OpenAI API and a chat page over a deployment."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

from client.commands.common import OK, add_command, add_grpc_address, positive, say, seconds
from client.openai.settings import KEYS_VARIABLE, MIB, ApiKeys, ProxySettings

_LOCAL = ("127.0.0.1", "::1", "localhost")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def add(commands: Any) -> None:
    parser = add_command(
        commands, "openai-proxy", run, "serve the OpenAI API and a chat page over a deployment"
    )
    add_grpc_address(parser)
    option = parser.add_argument
    option("--host", default="127.0.0.1", help="address to listen on")
    option("--port", type=int, default=8080, help="0: any free port")
    option("--served-model-name", help="the model's name in the API (as on the server)")
    option("--api-key-file", type=Path, help=f"a key a line; also {KEYS_VARIABLE}=KEY,KEY")
    option("--tls-certificate", type=Path, help="PEM file: serve HTTPS")
    option("--tls-key", type=Path, help="PEM file of its key")
    option("--request-timeout", type=seconds, help="seconds of one generation; none if left out")
    option("--max-body-mib", type=positive, default=16, help="of a request's body")
    option("--requests-per-minute", type=positive, help="of each caller; no limit if left out")
    option("--max-in-flight", type=positive, default=1024, help="generations at once")
    option(
        "--cors-origin", type=_origin, action="append", help="https://host of pages that may call"
    )
    option("--drain-seconds", type=positive, default=10, help="for running answers at a stop")
    option(
        "--slow-reader-seconds", type=positive, default=60, help="then, taking nothing, it is cut"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        import uvicorn

        from client.openai.app import create_app
        from client.openai.connections import ImpatientProtocol
    except ImportError as error:
        raise ValueError(
            f"expected the packages of the extra openai-proxy, but {error}: "
            "pip install '.[openai-proxy]'"
        ) from None
    keys = ApiKeys.read(arguments.api_key_file)
    settings = ProxySettings(
        deployment=arguments.url or ProxySettings.deployment,
        model=arguments.model,
        served_name=arguments.served_model_name or arguments.model,
        request_timeout=arguments.request_timeout,
        most_body_bytes=arguments.max_body_mib * MIB,
        requests_per_minute=arguments.requests_per_minute,
        most_in_flight=arguments.max_in_flight,
        cors_origins=tuple(arguments.cors_origin or ()),
    )
    _check_tls(arguments.tls_certificate, arguments.tls_key)
    listening = _listen(arguments.host, arguments.port, arguments.slow_reader_seconds)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings, keys),
            log_config=None,
            access_log=False,
            server_header=False,
            # A client could write any address into these headers.
            proxy_headers=False,
            timeout_graceful_shutdown=arguments.drain_seconds,
            ssl_certfile=arguments.tls_certificate,
            ssl_keyfile=arguments.tls_key,
            http=ImpatientProtocol,
            ws="none",
        )
    )
    scheme, port = "https" if arguments.tls_key else "http", listening.getsockname()[1]
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"OpenAI API  {scheme}://{host}:{port}/v1", flush=True)
    print(f"chat page   {scheme}://{host}:{port}/", flush=True)
    if not keys and arguments.host not in _LOCAL:
        say(
            f"dsv41-client: no API keys, and {arguments.host} is not only this machine: whoever "
            "reaches it may generate"
        )
    # The library raises the signal again when it has drained; a drained stop is a success.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listening])
    return OK


def _origin(text: str) -> str:
    """As browsers send it, or every one: another would never match."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected an origin as browsers send it, such as https://host or "
            f"http://localhost:3000, in small letters and without a path, or *; got {text!r}"
        )
    return text


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ValueError("expected --tls-certificate and --tls-key together, got one of them")

    def no_password() -> str:
        """Without it the library asks whoever sits at the terminal, here and in each start."""
        raise ValueError(
            f"expected a key without a password for --tls-key, got {key}, which is encrypted; give "
            f"a plain one: openssl pkey -in {key} -out plain.pem"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"expected a certificate and its key as PEM files, but {error}: {certificate}, {key}"
        ) from None


def _listen(host: str, port: int, patience: int) -> socket.socket:
    """Connections inherit the patience, seconds: the system resets one whose client takes nothing
    for so long, and its answer ends as one whose client left."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
        # Of a socket that was made like this asyncio does not ask it: tokens would wait 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience * 1000)
        return listening
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"expected an address to listen on, but {error}: {host} port {port}"
        ) from None
