"""What a server does when its parts fail: steps, the executor for good, readers, the engine."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from python_backend import wire
from tests.server.deployment import (
    GOLDEN,
    MODEL,
    PROMPT,
    Deployment,
    EventStream,
    RefusedError,
    free_ports,
    joined,
    launch,
    shared_memory,
)

pytestmark = pytest.mark.server

FAULT = 500  # the model below fails in a step where a prompt begins with this token
REPLAYED: list[int] = GOLDEN["greedy_from_20_replay"].tolist()


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """For two requests at once and a queue of three."""
    deployment = Deployment.with_faults(
        engine,
        tmp_path_factory.mktemp("faulty"),
        *("--dtype=float64", "--global-page-tokens=32"),
        *("--max-batch-size=2", "--max-queued-requests=3"),
        fault_token=FAULT,
    )
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def golden() -> dict[str, object]:
    return {"input_ids": PROMPT, "max_tokens": 24, "end_id": -1}


def long_stream() -> dict[str, object]:
    return {"input_ids": PROMPT, "max_tokens": 900, "end_id": -1, "stream": True}


def test_a_full_queue_is_unavailable_and_a_storm_of_cancellations_empties_it(
    server: Deployment,
) -> None:
    running = [server.stream(**long_stream()) for _ in range(2)]
    for stream in running:
        next(iter(stream))
    waiting = [server.stream(**long_stream()) for _ in range(3)]
    deadline = time.monotonic() + 10
    while server.metric("dsv41_num_requests_waiting") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    refusals = 0
    for _ in range(20):
        with pytest.raises(RefusedError, match=r"\[unavailable\] .* fewer than 3 requests"):
            server.generate(**golden())
        refusals += 1
    for stream in (*running, *waiting):
        stream.cancel()
    assert server.seconds_until_empty(2) < 2
    time.sleep(0.25)
    assert server.metric("dsv41_admission_rejections_total", code="unavailable") == refusals
    assert server.metric("dsv41_request_success_total", finished_reason="cancelled") == 5


def test_readers_that_do_not_read_stall_nobody_and_lose_nothing(server: Deployment) -> None:
    with EventStream(server.http, {**golden(), "stream": True}) as unread:
        slow = server.stream(**golden(), stream=True)
        assert server.generate(**golden())["output_ids"] == REPLAYED
        assert joined(list(unread))[1] == REPLAYED
        assert joined(list(slow))[1] == REPLAYED


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(["id", "no such", "parameters", *(tensor.name for tensor in wire.INPUTS)])
BODIES = st.one_of(
    st.binary(max_size=30),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(FIELDS, JSON, max_size=3).map(
        lambda fields: json.dumps({"input_ids": PROMPT, "max_tokens": 1, **fields}).encode()
    ),
)


# What the server itself answers with 500: to bodies that are no JSON, or no object of tensors.
# A failed model would be "Failed to process the request(s) for model instance ...".
ITS_OWN = re.compile(r"(?!.*model instance).*(\bJSON\b|Unable to parse |attempt to )")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["generate", "generate_stream", "infer"]), BODIES)
def test_any_body_gets_an_answer_and_no_unexplained_failure(
    server: Deployment, road: str, body: bytes
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=20)
    connection.request("POST", f"/v2/models/{MODEL}/{road}", body)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert b"[internal]" not in answer
    its_own = response.status == 500 and ITS_OWN.match(json.loads(answer)["error"])
    assert response.status in (200, 400, 501) or its_own, (response.status, answer)
    assert response.status == 200 or b"error" in answer


def test_the_server_is_as_before_after_all_that(server: Deployment) -> None:
    assert server.generate(**golden())["output_ids"] == REPLAYED
    assert server.seconds_until_empty(2) < 2
    assert not server.events("execute_failed")
    assert not server.events("response_failed")


def test_a_failed_step_ends_its_requests_and_the_server_goes_on(server: Deployment) -> None:
    """The running stream shares the failing step; the waiting ones were in none."""
    beside = server.stream("beside", **long_stream())
    chunks = iter(beside)
    next(chunks)
    fault = server.stream("fault", input_ids=[FAULT, 5], max_tokens=3, end_id=-1)
    waiting = [server.stream(**golden()) for _ in range(2)]
    for stream in (fault, chunks):
        with pytest.raises(RefusedError, match=r"^\[internal\] .*a fault was ordered; try again"):
            list(stream)
    for stream in waiting:
        (answer,) = list(stream)
        assert answer["output_ids"] == REPLAYED
    assert server.seconds_until_empty(2) < 2
    (failed,) = server.events("a step of 2 requests failed")
    assert "a fault was ordered" in failed["exception"]


def test_an_executor_that_fails_for_good_ends_the_server(server: Deployment) -> None:
    """For the supervisor to start a new one: exit status 1, a reason, nothing left behind."""
    for _ in range(3):
        with pytest.raises(RefusedError, match=r"^400 \[internal\]"):
            server.generate(input_ids=[FAULT, 5], max_tokens=3)
    assert server.wait() == 1
    assert "dsv41-serve: the serving core failed" in server.everything()
    assert server.region not in shared_memory()


def test_a_damaged_engine_is_refused_at_once(engine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    weights = copy / "rank0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ports = zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    status, said = launch("--engine", str(copy), *(f"--{name}-port={port}" for name, port in ports))
    assert status == 1
    assert "rank0.safetensors" in said.splitlines()[-1]
    assert "bytes" in said.splitlines()[-1]
    assert "Traceback" not in said
