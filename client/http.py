"""The deployment over HTTP: the server's `generate` and `generate_stream` endpoints.

`generate_stream` sends server-sent events and ends with the body; closing its connection cancels
the request on the server, which notices it once it has sent an event. `generate` takes exactly one
response, and the server does not notice when its connection closes: an unstreamed generation that
times out runs on there to its end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from client.health import probe
from client.protocol import (
    DEADLINE_EXCEEDED,
    DEFAULT_MODEL,
    INVALID_ARGUMENT,
    PROTOCOL_ERROR,
    SERVER_ERROR,
    UNAVAILABLE,
    DeploymentError,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    Health,
)
from client.stream import GenerateStream
from client.tensors import chunk_from_outputs, input_tensors

_CODES = {400: INVALID_ARGUMENT, 404: "not_found", 503: UNAVAILABLE}


class HttpClient:
    """Generates over HTTP. May be used from many threads at once: each request has a connection.

    url: host:port of the server's HTTP endpoint, "http://" allowed before it. model: the model's
    name on the server.
    """

    def __init__(self, url: str = "localhost:8000", model: str = DEFAULT_MODEL) -> None:
        self.url = url
        self.model = model
        self._address = url.removeprefix("http://").rstrip("/")

    def generate(self, request: GenerateRequest, *, timeout: float | None = None) -> GenerateResult:
        """The whole answer in one response. `timeout` in seconds, for everything.

        Raises DeploymentError, also when the server answers status 200 with an error in the body;
        ValueError for a value that its tensor cannot hold.
        """
        body = _body(request, stream=False)
        exchange = _Exchange(self._address, timeout)
        status, answer = exchange.read(self._path("generate"), body)
        return GenerateStream(iter([_chunk(status, answer)]), exchange.close).result()

    def stream(self, request: GenerateRequest, *, timeout: float | None = None) -> GenerateStream:
        """The answer as it is generated. Errors as for `generate`, most raised while iterating."""
        body = _body(request, stream=True)
        exchange = _Exchange(self._address, timeout)
        exchange.send(self._path("generate_stream"), body)
        return GenerateStream(exchange.events(), exchange.close, request.num_return_sequences or 1)

    def health(self, *, deep: bool = False, timeout: float = 10.0) -> Health:
        """Asks for the three states; `deep` also generates one token. Raises nothing."""
        paths = {
            "live": "/v2/health/live",
            "ready": "/v2/health/ready",
            "model": f"/v2/models/{self.model}/ready",
        }

        def ask(what: str) -> bool:
            status, _ = _Exchange(self._address, timeout).read(paths[what], None)
            return status == http.client.OK

        return probe(ask, self.generate if deep else None, self.model, timeout)

    def close(self) -> None:
        """Nothing is kept between requests; for symmetry with the gRPC client."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _path(self, action: str) -> str:
        return f"/v2/models/{self.model}/{action}"


class _Exchange:
    """One connection, one request, one deadline (`timeout` in seconds) over all of it."""

    def __init__(self, address: str, timeout: float | None) -> None:
        self._address = address
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None

    def send(self, path: str, body: bytes | None) -> None:
        """Connects and sends: POST with a body, GET without."""
        try:
            self._connection = http.client.HTTPConnection(self._address, timeout=self._remaining())
            self._connection.connect()
            self._socket = self._connection.sock
            headers = {"Content-Type": "application/json", "Connection": "close"}
            method = "GET" if body is None else "POST"
            self._connection.request(method, path, body=body, headers=headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._error(error) from None

    def read(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Sends, and returns status and body."""
        self.send(path, body)
        try:
            with self._response() as response:
                return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._error(error) from None
        finally:
            self.close()

    def events(self) -> Iterator[GenerateChunk]:
        """The chunks of the server-sent event stream that the sent request is answered with."""
        try:
            with self._response() as response:
                while line := self._line(response):
                    if line.strip():
                        yield _chunk(response.status, line.removeprefix(b"data:"))
        except (OSError, http.client.HTTPException) as error:
            raise self._error(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection. From another thread than the reader's: the reader sees it end."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the other side was faster
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()  # the descriptor lives on while a reader has it

    def _response(self) -> http.client.HTTPResponse:
        assert self._connection is not None
        assert self._socket is not None
        self._socket.settimeout(self._remaining())
        return self._connection.getresponse()

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        assert self._socket is not None
        self._socket.settimeout(self._remaining())
        return response.readline()

    def _remaining(self) -> float | None:
        if self._deadline is None:
            return None
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining

    def _error(self, error: Exception) -> DeploymentError:
        if isinstance(error, TimeoutError):
            return DeploymentError(DEADLINE_EXCEEDED, "the time limit passed before the answer")
        words = str(error)
        if not words or not words.isprintable():  # the first bytes of some other protocol
            words = type(error).__name__
        return DeploymentError(
            UNAVAILABLE,
            f"expected a server at {self._address} (HTTP), got no answer: check the address and "
            f"that the server runs ({words})",
        )


def _body(request: GenerateRequest, *, stream: bool) -> bytes:
    values: dict[str, Any] = {}
    for spec, array in input_tensors(request, stream=stream):
        if spec.datatype == "BYTES":
            texts = [text.decode("utf-8") for text in array[0].tolist()]
            values[spec.name] = texts[0] if len(texts) == 1 else texts
        else:
            values[spec.name] = array[0].tolist()
    if request.request_id:
        values["id"] = request.request_id
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _chunk(status: int, body: bytes) -> GenerateChunk:
    """A chunk from one JSON object, or the error that the object or the status tells of."""
    try:
        values = json.loads(body)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise DeploymentError(
            PROTOCOL_ERROR,
            f"expected a JSON object, got status {status} and {body[:80]!r}: is this the "
            "HTTP port of the deployment?",
        )
    if "error" in values or status != http.client.OK:
        text = str(values.get("error", ""))
        raise DeploymentError.from_server(text, _CODES.get(status, SERVER_ERROR))
    return chunk_from_outputs(values)
