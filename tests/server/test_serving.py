"""The real Triton server with the golden engine: both protocols, text, cancellation, bad input.

Hits come in blocks of 32 tokens here, so a prompt of 20 never hits and is exactly reproducible.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.deployment import (
    GOLDEN,
    MODEL,
    PROMPT,
    Deployment,
    EventStream,
    RefusedError,
    get,
    joined,
    post,
    shared_memory,
)

pytestmark = pytest.mark.server

REPLAYED: list[int] = GOLDEN["greedy_from_20_replay"].tolist()


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Deployment]:
    deployment = Deployment(engine, "--dtype=float64", "--global-page-tokens=32")
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def golden(max_tokens: int = 24, **values: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "max_tokens": max_tokens, "end_id": -1, **values}


def test_ready_means_that_a_token_was_made(server: Deployment) -> None:
    (first,) = server.events("request_finished")[:1]
    assert (first["request_id"], first["num_output_tokens"]) == ("readiness", 1)
    assert get(server.http, "/v2/health/ready")[0] == 200
    assert any("loading weights: " in line for line in server.said)
    urls = "\n".join(server.said)
    for port in (server.http, server.grpc, server.metrics):
        assert f"127.0.0.1:{port}" in urls


def test_golden_tokens_over_both_protocols(server: Deployment) -> None:
    """Streamed and whole, all four in one batch."""
    streamed, whole = server.stream(**golden(stream=True)), server.stream(**golden())
    by_http = list(server.sse(**golden(stream=True)))
    by_grpc, (only,) = list(streamed), list(whole)
    whole_by_http = server.generate(**golden())

    assert joined(by_grpc)[1] == joined(by_http)[1] == REPLAYED
    assert only["output_ids"] == whole_by_http["output_ids"] == REPLAYED
    assert len(by_grpc) == len(by_http) == 24
    assert (streamed.finals, whole.finals) == ([False] * 23 + [True], [True])
    for answer in (by_grpc, by_http):
        assert [i for i, chunk in enumerate(answer) if "cached_tokens" in chunk] == [0]
        for name in ("finish_reason", "num_input_tokens", "num_output_tokens"):
            assert [i for i, chunk in enumerate(answer) if name in chunk] == [23]
    for last in (by_http[-1], whole_by_http):
        assert (last["finish_reason"], last["num_input_tokens"], last["num_output_tokens"]) == (
            "length",
            20,
            24,
        )


def test_streamed_text_concatenates_to_the_unstreamed(server: Deployment, engine: Path) -> None:
    """The library's decode of all ids is the independent oracle of the text."""
    asked = {"text_input": "Grüße, 世界 🙂", "max_tokens": 24, "end_id": -1}
    by_http, by_grpc = server.sse(**asked, stream=True), server.stream(**asked, stream=True)
    whole = server.generate(**asked)
    expected = (whole["text_output"], whole["output_ids"])
    assert joined(list(by_http)) == joined(list(by_grpc)) == expected
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    assert whole["text_output"] == tokenizer.decode(whole["output_ids"])
    # The prompt is the begin token and one token a byte.
    assert whole["num_input_tokens"] == 1 + len("Grüße, 世界 🙂".encode())


def test_a_text_is_its_ids(server: Deployment) -> None:
    tokenizer_free = [0, *server_ids("abc")]
    by_ids = server.generate(input_ids=tokenizer_free, max_tokens=4, end_id=-1)
    assert (
        server.generate(text_input="abc", max_tokens=4, end_id=-1)["output_ids"]
        == (by_ids["output_ids"])
    )


def server_ids(text: str) -> list[int]:
    """Ids of ASCII letters in the byte tokenizer: 0, 1 and 2 are special, then the bytes in the
    order of their printable characters, "!" (0x21) first."""
    return [3 + ord(character) - 0x21 for character in text]


def test_the_end_token_stops_and_is_an_id_but_no_text(server: Deployment) -> None:
    third = REPLAYED[2]
    whole = server.generate(**golden(end_id=third))
    assert (whole["finish_reason"], whole["output_ids"]) == ("stop", REPLAYED[:3])
    two = server.generate(**golden(max_tokens=2))
    assert whole["text_output"] == two["text_output"]


def test_a_longer_prompt_on_a_shared_prefix_reports_cached_tokens(server: Deployment) -> None:
    tokens = GOLDEN["tokens"].tolist()
    assert server.generate(input_ids=tokens[:40], max_tokens=1)["cached_tokens"] == 0
    assert server.generate(input_ids=tokens, max_tokens=1)["cached_tokens"] == 32


def test_a_seed_repeats_and_its_absence_does_not(server: Deployment) -> None:
    def ids(**values: Any) -> list[int]:
        answer: list[int] = server.generate(**golden(8, temperature=5.0, **values))["output_ids"]
        return answer

    assert ids(seed=11) == ids(random_seed=11) != ids(seed=12)
    assert ids() != ids()  # equal with a chance of about 500^-8


def test_32_concurrent_streams(server: Deployment) -> None:
    """Together in one batch, each gets what it gets alone."""
    results: dict[int, list[int]] = {}

    def one(number: int) -> None:
        asked = golden(8, stream=True)
        chunks = server.stream(f"s{number}", **asked) if number % 2 else server.sse(**asked)
        results[number] = joined(list(chunks))[1]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    most_running = 0.0
    while any(thread.is_alive() for thread in threads):
        most_running = max(most_running, server.metric("dsv41_num_requests_running"))
        time.sleep(0.02)
    assert results == dict.fromkeys(range(32), REPLAYED[:8])
    assert most_running == 32
    assert server.seconds_until_empty(1.0) < 1.0


def test_cancel_by_grpc_frees_all_pages_within_a_second(server: Deployment) -> None:
    stream = server.stream("leaves", **golden(900, stream=True))
    chunks = iter(stream)
    next(chunks)
    server.wait_for_work()
    stream.cancel()
    assert server.seconds_until_empty(1.0) < 1.0
    finished = server.events("request_finished")[-1]
    assert (finished["request_id"], finished["finish_reason"]) == ("leaves", "cancelled")


def test_a_closed_sse_connection_frees_all_pages_within_a_second(server: Deployment) -> None:
    with EventStream(server.http, golden(900, stream=True, id="closes")) as events:
        next(iter(events))
        server.wait_for_work()
    assert server.seconds_until_empty(1.0) < 1.0
    finished = server.events("request_finished")[-1]
    assert (finished["request_id"], finished["finish_reason"]) == ("closes", "cancelled")


def test_a_slow_reader_stalls_nobody(server: Deployment) -> None:
    with EventStream(server.http, golden(30, stream=True)) as unread:
        assert unread.status == 200
        assert server.generate(**golden(8))["output_ids"] == REPLAYED[:8]
        assert len(list(unread)) == 30


def test_a_stream_through_generate_is_status_200_and_an_error_body(server: Deployment) -> None:
    with pytest.raises(RefusedError, match=r"^200 generate expects model to produce exactly 1"):
        server.generate(**golden(3, stream=True))


BAD = [
    ({"max_tokens": 1}, "expected exactly one of text_input, input_ids, messages, got none"),
    (
        {"text_input": "a", "input_ids": [1]},
        "expected exactly one of .*, got text_input and input_ids",
    ),
    ({"input_ids": []}, "expected at least one prompt token, got none"),
    ({"text_input": ""}, "expected a prompt of at least one token, got an empty text"),
    ({"input_ids": [1, 512]}, "expected token ids from 0 to 511, got 512 at position 1"),
    ({"input_ids": [-1]}, "expected token ids from 0 to 511, got -1 at position 0"),
    ({"input_ids": [1], "max_tokens": 0}, "expected max_tokens ≥ 1, got 0"),
    ({"input_ids": [1], "max_tokens": 1024}, "at most 1024 tokens together, got 1 \\+ 1024"),
    ({"input_ids": [1], "temperature": -1.0}, "expected a finite temperature .*, got -1.0"),
    ({"input_ids": [1], "temperature": float("nan")}, "expected a finite temperature .*, got nan"),
    ({"input_ids": [1], "top_p": float("nan")}, "expected top_p above 0 .*, got nan"),
    ({"input_ids": [1], "top_p": -0.5}, "expected top_p above 0 .*, got -0.5"),
    ({"input_ids": [1], "top_k": -1}, "expected top_k from 0 .*, got -1"),
    ({"input_ids": [1], "end_id": 512}, "expected end ids from 0 to 511, got 512"),
    ({"input_ids": [1], "beam_width": 2}, "expected beam_width to be 1 or not sent, got 2"),
    ({"input_ids": [1], "stop_words": [b"x"] * 17}, "expected at most 16 stop_words, got 17"),
    ({"input_ids": np.ones((3, 2), np.int32)}, r"expected one request per call, .*got \[3, 2\]"),
]


def test_long_texts_let_others_pass(server: Deployment) -> None:
    """Two megabytes take a second or more to read, to no good: they do not fit. Meanwhile others
    are answered."""
    refusals: list[str] = []

    def ask() -> None:
        with pytest.raises(RefusedError) as refused:
            list(server.stream("long", text_input="word " * 400_000, max_tokens=1))
        refusals.append(str(refused.value))

    asking = threading.Thread(target=ask)
    asking.start()
    answered = 0
    while asking.is_alive():
        assert server.generate(**golden(1))["output_ids"] == REPLAYED[0]
        answered += 1
    asking.join()
    assert answered > 5
    assert "tokens together, got" in refusals[0]


@pytest.mark.parametrize(("values", "sentence"), BAD)
def test_bad_input_gets_a_sentence(
    server: Deployment, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RefusedError, match=rf"\[invalid_argument\] .*{sentence}"):
        list(server.stream(**values))
    assert server.seconds_until_empty(1.0) < 1.0


def test_wrong_types_and_shapes_are_refused_by_the_server_itself(server: Deployment) -> None:
    with pytest.raises(RefusedError, match=r"unexpected shape for input 'max_tokens'"):
        list(server.stream(input_ids=[1], max_tokens=[1, 2]))
    with pytest.raises(RefusedError, match=r"unexpected shape for input 'input_ids'"):
        list(server.stream(input_ids=np.ones(3, np.int32)))
    with pytest.raises(RefusedError, match=r"data-type is 'INT64', but .* expects 'INT32'"):
        list(server.stream(input_ids=np.ones((1, 3), np.int64)))
    with pytest.raises(RefusedError, match=r"unexpected inference input 'lora_task_id'"):
        list(server.stream(input_ids=[1], lora_task_id=1))
    with pytest.raises(RefusedError, match=r"^500 Unable to parse"):
        server.generate(input_ids="not ids")


def test_an_unknown_json_field_is_not_ignored(server: Deployment) -> None:
    with pytest.raises(RefusedError, match=r"^400 \[invalid_argument\].*did you mean max_tokens"):
        server.generate(input_ids=[1], max_token=5)


def test_what_is_the_operators_is_closed_to_clients(server: Deployment) -> None:
    """A client that registers the model process's own shared memory could write into it; verbose
    logging, tracing and unloading are nobody's business either."""
    region = {"key": f"/{server.region}", "offset": 0, "byte_size": 64}
    for path, body in (
        ("systemsharedmemory/region/x/register", region),
        ("logging", {"log_verbose_level": 9}),
        ("trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        (f"repository/models/{MODEL}/unload", {}),
    ):
        status, said = post(server.http, f"/v2/{path}", body)
        assert (status, b"restricted" in said) == (403, True), path
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = (
            (stub.SystemSharedMemoryRegister, service_pb2.SystemSharedMemoryRegisterRequest),
            (stub.LogSettings, service_pb2.LogSettingsRequest),
            (stub.TraceSetting, service_pb2.TraceSettingRequest),
            (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest),
        )
        for call, request in calls:
            with pytest.raises(grpc.RpcError, match="restricted"):
                call(request(), timeout=10)


def test_log_lines_are_json_with_the_clients_request_id(server: Deployment) -> None:
    list(server.stream("my request", **golden(2)))
    list(server.stream("my request", **golden(2)))  # clients repeat ids
    mine = [e for e in server.events("request_finished") if e["request_id"] == "my request"]
    assert [e["num_output_tokens"] for e in mine] == [2, 2]
    assert len({e["key"] for e in mine}) == 2
    assert not [line for line in server.logged if isinstance(line, str)]


def test_when_the_server_is_killed_the_launcher_says_so_and_cleans_up(server: Deployment) -> None:
    """The last test of this server."""
    server.child("tritonserver").kill()
    assert server.wait() == 1
    (said,) = [line for line in server.logged if isinstance(line, str)]
    assert said.startswith("dsv41-serve: the Triton server ended with signal 9")
    assert server.region not in shared_memory()
