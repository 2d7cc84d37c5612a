"""While a step runs for seconds: deadlines, clients that leave, and the end of the server hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.deployment import (
    GOLDEN,
    PROMPT,
    STUB,
    Deployment,
    RefusedError,
    joined,
    shared_memory,
)

pytestmark = pytest.mark.server

FAULT, SLOW = 500, 501  # a step takes as many seconds longer as the token behind SLOW says
REPLAYED: list[int] = GOLDEN["greedy_from_20_replay"].tolist()


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment.with_faults(
        engine,
        tmp_path_factory.mktemp("slow"),
        *("--dtype=float64", "--global-page-tokens=32", "--drain-seconds=1"),
        fault_token=FAULT,
        slow_token=SLOW,
    )
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def slow(seconds: int, **values: Any) -> dict[str, Any]:
    return {"input_ids": [SLOW, seconds], "max_tokens": 1, "end_id": -1, **values}


def finished(server: Deployment, reason: str) -> float:
    return server.metric("dsv41_request_success_total", finished_reason=reason)


def ends(server: Deployment, request_id: str) -> list[str]:
    events = server.events("request_finished")
    return [event["finish_reason"] for event in events if event["request_id"] == request_id]


def wait_for_a_step(server: Deployment) -> None:
    """Gauges are set ten times a second, also while a step runs."""
    server.wait_for_work()
    time.sleep(0.1)


def test_a_deadline_passes_in_a_step(server: Deployment) -> None:
    """The step would have ended the request, with `length`; it is counted as its client was told.
    A stream beside it goes on."""
    beside = server.stream("beside", input_ids=PROMPT, max_tokens=24, end_id=-1, stream=True)
    started = time.monotonic()
    with pytest.raises(RefusedError, match=r"\[deadline_exceeded\] .*timeout of 0.3 s"):
        list(server.stream("late", **slow(4, timeout=300_000)))
    assert time.monotonic() - started < 1.5
    assert server.metric("dsv41_kv_pages_used", pool="window")  # of the step, which runs on
    ids = [token for chunk in beside for token in chunk["output_ids"]]
    assert ids == REPLAYED
    assert server.seconds_until_empty(5) < 5
    assert time.monotonic() - started > 4
    time.sleep(0.3)
    made_at_start = 2  # of one token: the model's, and the launcher's
    assert finished(server, "timeout") == 1
    assert finished(server, "length") == made_at_start + 1
    assert ends(server, "late") == ["timeout"]


def test_a_client_leaves_in_a_step(server: Deployment) -> None:
    started = time.monotonic()
    stream = server.stream("leaves", **slow(4, num_return_sequences=2))
    wait_for_a_step(server)
    stream.cancel()
    while not ends(server, "leaves"):
        assert time.monotonic() - started < 3
        time.sleep(0.02)
    assert not server.is_empty()
    assert server.seconds_until_empty(6) < 6
    time.sleep(0.3)
    assert finished(server, "cancelled") == 2
    assert ends(server, "leaves") == ["cancelled"]
    assert not server.events("responder_failed")
    assert not server.events("response_failed")
    answer = server.generate(input_ids=PROMPT, max_tokens=24, end_id=-1)
    assert answer["output_ids"] == REPLAYED


def test_prompts_of_many_rows_run_in_short_steps(server: Deployment) -> None:
    """Two answers, and their client's leaving, beside 24,000 rows of prompts, of which one step may
    have 8,192: their pages are free within a second."""
    for_two = {"input_ids": PROMPT, "max_tokens": 900, "end_id": -1, "stream": True}
    two = server.stream("two", **for_two, num_return_sequences=2)
    chunks = iter(two)
    seen: set[int] = set()
    while seen != {0, 1}:
        seen |= set(next(chunks)["sequence_index"])
    prompts = np.random.default_rng(0).integers(2, 500, (24, 1000)).astype(np.int32)
    long = [server.stream(input_ids=ids[None], max_tokens=1, end_id=-1) for ids in prompts]
    (answer,) = list(long[3])  # by now, steps are as large as they get
    assert answer["num_input_tokens"] == [1000]
    before = finished(server, "cancelled")
    two.cancel()
    started = time.monotonic()
    while finished(server, "cancelled") < before + 2:
        assert time.monotonic() - started < 1
        time.sleep(0.02)
    assert server.metric("dsv41_num_requests_waiting") > 0
    for stream in long:
        stream.cancel()
    assert server.seconds_until_empty(2) < 2


def test_sigterm_in_a_step(server: Deployment) -> None:
    """The last test of this server: a drain of 1 s, and a step of 60 s."""
    stream = server.stream("cut", **slow(60))
    wait_for_a_step(server)
    started = time.monotonic()
    server.process.terminate()
    with pytest.raises(RefusedError, match=r"^\[unavailable\] .*the server stopped"):
        list(stream)
    assert 0.9 < time.monotonic() - started < 2.5
    assert server.wait() == 0
    assert time.monotonic() - started < 15
    assert ends(server, "cut") == ["error"]
    assert server.said[-1] == "dsv41-serve: stopped"
    assert server.region not in shared_memory()


def test_a_new_server_after_a_crash_and_a_drain_that_lets_answers_end(
    engine: Path, tmp_path: Path
) -> None:
    """As a supervisor starts it again: the same command on the same ports. Then SIGTERM in the
    first of the 24 steps of an answer, which ends whole."""
    crashed = Deployment.with_faults(
        engine, tmp_path, "--drain-seconds=30", fault_token=FAULT, slow_token=SLOW
    ).wait_until_ready()
    try:
        whole = crashed.generate(**slow(2, max_tokens=24))["output_ids"]
        crashed.child(STUB).kill()
        assert crashed.wait() == 1
    finally:
        crashed.end()
    server = crashed.again().wait_until_ready()
    try:
        stream = server.stream("ends", **slow(2, max_tokens=24, stream=True))
        wait_for_a_step(server)
        server.process.terminate()
        while not server.events("draining"):
            assert not ends(server, "ends")
            time.sleep(0.01)
        assert joined(list(stream))[1] == whole
        assert server.wait() == 0
        assert ends(server, "ends") == ["length"]
        assert server.said[-1] == "dsv41-serve: stopped"
    finally:
        server.end()
