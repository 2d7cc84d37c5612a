"""Both clients against the real server: the same request gives the same answer on either."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client import (
    DeploymentError,
    FinishReason,
    GenerateRequest,
    GrpcClient,
    HttpClient,
)
from tests.client.real_server import Server, assert_stops, free_address

pytestmark = pytest.mark.server

Client = GrpcClient | HttpClient

# Ids that ask the echo model for a behaviour; see fixture_repository.
ERROR_AFTER_THREE, SEVERAL, SLOW, EMPTY_FINAL, NO_REASON, DESCRIBE, CACHED = range(300, 307)


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    made: Client = GrpcClient(server.grpc) if request.param == "grpc" else HttpClient(server.http)
    with made:
        yield made


def slow(max_tokens: int = 1000) -> GenerateRequest:
    """50 ms a token."""
    return GenerateRequest(input_ids=[65, SLOW], max_tokens=max_tokens)


def test_unstreamed_answer(client: Client) -> None:
    result = client.generate(GenerateRequest(text_input="héllo", max_tokens=9))
    assert result.text_output == "héllohé"
    assert result.output_ids.tolist() == [104, 195, 169, 108, 108, 111, 104, 195, 169]


def test_streamed_deltas_join_to_the_unstreamed_answer(client: Client) -> None:
    request = GenerateRequest(text_input="día 日本", max_tokens=11)  # 4 + 1 + 6 bytes
    chunks = list(client.stream(request))
    whole = client.generate(request)
    assert len(chunks) == 11
    assert "".join(c.text_output for c in chunks) == whole.text_output == "día 日本"
    joined = np.concatenate([c.output_ids for c in chunks])
    assert joined.tolist() == whole.output_ids.tolist() == list("día 日本".encode())
    assert joined.dtype == np.int32


def test_only_the_ends_of_a_stream_carry_counts(client: Client) -> None:
    first, middle, last = client.stream(GenerateRequest(input_ids=[65, CACHED], max_tokens=3))
    assert (first.cached_tokens, middle.cached_tokens, last.cached_tokens) == (64, None, None)
    assert (first.finish_reason, middle.finish_reason) == (None, None)
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.num_input_tokens, last.num_output_tokens) == (2, 3)


def test_result_of_a_stream(client: Client) -> None:
    stream = client.stream(GenerateRequest(input_ids=[65, 66, CACHED], max_tokens=5))
    result = stream.result()
    assert result.text_output == "ABABA"
    assert result.output_ids.tolist() == [65, 66, 65, 66, 65]
    assert (result.cached_tokens, result.num_input_tokens, result.num_output_tokens) == (64, 3, 5)
    assert result.finish_reason is FinishReason.LENGTH
    assert stream.time_to_first_token is not None
    assert 0 < stream.time_to_first_token < 5


def test_end_token(client: Client) -> None:
    request = GenerateRequest(text_input="abc", max_tokens=9, end_id=ord("c"))
    result = client.stream(request).result()
    assert (result.text_output, result.finish_reason) == ("abc", FinishReason.STOP)


def test_final_response_without_outputs(client: Client) -> None:
    chunks = list(client.stream(GenerateRequest(input_ids=[65, EMPTY_FINAL], max_tokens=2)))
    assert [c.output_ids.tolist() for c in chunks] == [[65], [65]]


def test_every_input_arrives_with_its_type_and_shape(client: Client) -> None:
    request = GenerateRequest(
        input_ids=np.array([7, DESCRIBE], np.int64),
        max_tokens=3,
        temperature=0.5,
        top_k=40,
        top_p=0.25,
        seed=2**64 - 1,
        end_id=-1,
        request_id="r-1",
    )
    described = json.loads(client.generate(request).text_output)
    assert described == {
        "id": "r-1",
        "inputs": {
            "input_ids": ["int32", [1, 2], [7, 305]],
            "max_tokens": ["int32", [1, 1], [3]],
            "stream": ["bool", [1, 1], [False]],
            "temperature": ["float32", [1, 1], [0.5]],
            "top_k": ["int32", [1, 1], [40]],
            "top_p": ["float32", [1, 1], [0.25]],
            "seed": ["uint64", [1, 1], [2**64 - 1]],
            "end_id": ["int32", [1, 1], [-1]],
        },
    }


def test_what_is_not_given_is_left_to_the_server(client: Client) -> None:
    described = json.loads(
        client.stream(GenerateRequest(input_ids=[DESCRIBE])).result().text_output
    )
    assert described["inputs"] == {
        "input_ids": ["int32", [1, 1], [305]],
        "max_tokens": ["int32", [1, 1], [16]],
        "stream": ["bool", [1, 1], [True]],
    }


def test_nan_reaches_the_server_that_judges_it(client: Client) -> None:
    request = GenerateRequest(input_ids=[7, DESCRIBE], temperature=float("nan"))
    inputs = json.loads(client.generate(request).text_output)["inputs"]
    assert np.isnan(inputs["temperature"][2][0])


def test_long_prompt_in_one_piece(client: Client) -> None:
    ids = np.full(300_000, 66, np.int32)
    ids[0] = 67
    result = client.generate(GenerateRequest(input_ids=ids, max_tokens=2))
    assert (result.num_input_tokens, result.text_output) == (300_000, "CB")


def test_refused_request_keeps_the_server_s_code_and_sentence(client: Client) -> None:
    request = GenerateRequest(input_ids=[2000])
    for ask in (client.generate, lambda r: client.stream(r).result()):
        with pytest.raises(DeploymentError) as caught:
            ask(request)
        assert caught.value.code == "invalid_argument"
        assert caught.value.message == "token ids must be below 1000, got 2000"
        assert caught.value.partial is None


def test_error_in_mid_stream_keeps_what_came_before(client: Client) -> None:
    received: list[str] = []
    stream = client.stream(GenerateRequest(input_ids=[65, 66, ERROR_AFTER_THREE]))
    with pytest.raises(DeploymentError) as caught:
        received.extend(chunk.text_output for chunk in stream)
    assert received == ["A", "B", "A"]
    assert (caught.value.code, caught.value.message) == (
        "internal",
        "asked to fail after three tokens",
    )
    assert caught.value.partial is not None
    assert caught.value.partial.text_output == "ABA"
    assert caught.value.partial.output_ids.tolist() == [65, 66, 65]
    with pytest.raises(DeploymentError, match="after three tokens"):
        stream.result()


def test_status_200_with_an_error_body_raises(server: Server) -> None:
    """Several responses to `generate`: the server answers 200, and the body holds the error."""
    with pytest.raises(DeploymentError, match="exactly 1 response") as caught:
        HttpClient(server.http).generate(GenerateRequest(input_ids=[65, SEVERAL], max_tokens=3))
    assert caught.value.code == "server_error"


def test_stream_without_a_finish_reason_is_an_error(client: Client) -> None:
    with pytest.raises(DeploymentError, match="finish reason") as caught:
        client.stream(GenerateRequest(input_ids=[65, NO_REASON], max_tokens=2)).result()
    assert caught.value.code == "protocol_error"
    assert caught.value.partial is not None
    assert caught.value.partial.output_ids.tolist() == [65, 65]


def test_cancel_stops_the_request_on_the_server(client: Client, server: Server) -> None:
    stream = client.stream(slow())
    assert next(stream).text_output == "A"
    stream.cancel()
    result = stream.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert set(result.text_output) == {"A"}
    stream.cancel()  # harmless
    assert_stops(server)


def test_leaving_the_with_block_cancels(client: Client, server: Server) -> None:
    with client.stream(slow()) as stream:
        next(stream)
    assert_stops(server)


def test_dropping_the_stream_cancels(client: Client, server: Server) -> None:
    stream = client.stream(slow())
    next(stream)
    del stream
    assert_stops(server)


def test_cancel_before_the_first_chunk(client: Client, server: Server) -> None:
    stream = client.stream(slow())
    stream.cancel()
    assert list(stream) == []
    assert_stops(server)


def test_leaving_after_the_last_chunk_cancels_nothing(client: Client) -> None:
    """Cancelling a finished request made the server hang when it was told to stop."""
    with client.stream(GenerateRequest(input_ids=[65, EMPTY_FINAL], max_tokens=2)) as stream:
        chunks = [next(stream), next(stream)]
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert stream.result().finish_reason is FinishReason.LENGTH


def test_cancel_from_another_thread_ends_a_waiting_reader(client: Client, server: Server) -> None:
    with client.stream(slow()) as stream:
        next(stream)
        timer = threading.Timer(0.3, stream.cancel)
        timer.start()
        began = time.monotonic()
        assert stream.result().finish_reason is FinishReason.CANCELLED
        assert 0.2 < time.monotonic() - began < 5
    assert_stops(server)


def test_timeout_of_a_stream(client: Client, server: Server) -> None:
    with pytest.raises(DeploymentError) as caught:
        client.stream(slow(), timeout=0.5).result()
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.partial is not None
    assert 1 <= caught.value.partial.output_ids.size <= 10  # 0.5 s at 50 ms a token
    assert_stops(server)


def test_timeout_of_an_unstreamed_answer(client: Client) -> None:
    began = time.monotonic()
    with pytest.raises(DeploymentError) as caught:
        client.generate(slow(max_tokens=30), timeout=0.3)
    assert caught.value.code == "deadline_exceeded"
    assert time.monotonic() - began < 1.2  # the model needs 1.5 s


def test_many_streams_of_one_client_at_once(client: Client) -> None:
    def ask(number: int) -> str:
        text = f"request {number:02d} "  # 11 bytes
        request = GenerateRequest(text_input=text, max_tokens=21)
        return client.stream(request).result().text_output

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert answers == [f"request {n:02d} request {n:02d}" for n in range(16)]


def test_health(client: Client) -> None:
    health = client.health()
    assert (health.live, health.ready, health.model_ready) == (True, True, True)
    assert (health.generates, health.ok, health.detail) == (None, True, "")
    assert client.health(deep=True).generates is True


@pytest.mark.parametrize("kind", [GrpcClient, HttpClient])
def test_health_of_an_unknown_model(kind: type[Client], server: Server) -> None:
    address = server.grpc if kind is GrpcClient else server.http
    health = kind(address, model="nobody").health(deep=True)
    assert (health.live, health.ready, health.model_ready) == (True, True, False)
    assert (health.generates, health.ok) == (False, False)
    assert "nobody" in health.detail


@pytest.mark.parametrize("kind", [GrpcClient, HttpClient])
def test_unknown_model(kind: type[Client], server: Server) -> None:
    address = server.grpc if kind is GrpcClient else server.http
    client = kind(address, model="nobody")
    with pytest.raises(DeploymentError, match="nobody"):
        client.generate(GenerateRequest(text_input="a"))
    with pytest.raises(DeploymentError, match="nobody"):
        client.stream(GenerateRequest(text_input="a")).result()


@pytest.mark.parametrize("kind", [GrpcClient, HttpClient])
def test_nobody_listens(kind: type[Client]) -> None:
    address = free_address()
    client = kind(address)
    health = client.health()
    assert (health.live, health.ok) == (False, False)
    assert address in health.detail
    with pytest.raises(DeploymentError, match=address) as caught:
        client.stream(GenerateRequest(text_input="a")).result()
    assert caught.value.code == "unavailable"


class SomethingElse(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_another_service_on_the_http_port() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), SomethingElse) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        client = HttpClient(f"127.0.0.1:{other.server_port}")
        with pytest.raises(DeploymentError, match="HTTP port of the deployment") as caught:
            client.generate(GenerateRequest(text_input="a"))
        thread.join()
    assert caught.value.code == "protocol_error"
