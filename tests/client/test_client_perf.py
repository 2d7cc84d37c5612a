"""perf: the numbers from hand-made profiles, and the real perf_analyzer on the real server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from client import DeploymentError, GrpcClient
from client.cli import main
from client.perf import (
    DEFAULT_ENVIRONMENT,
    Workload,
    find_perf_analyzer,
    measure,
    parse_concurrency,
)
from client.perf_profile import read_profile, summarise
from tests.client.real_server import Server

MS = 1_000_000
GARBAGE = -1079769692  # what an absent output is exported as


def response(ids: Any, reason: str = "", made: int = GARBAGE, cached: int = GARBAGE) -> Any:
    return {
        "output_ids": ids,
        "finish_reason": reason,
        "num_output_tokens": made,
        "num_input_tokens": 40 if reason else GARBAGE,
        "cached_tokens": cached,
        "text_output": "",
    }


def profile(path: Path, *requests: tuple[int, list[tuple[int, Any]]]) -> Path:
    exported = [
        {
            "timestamp": sent * MS,
            "response_timestamps": [at * MS for at, _ in responses],
            "response_outputs": [output for _, output in responses],
        }
        for sent, responses in requests
    ]
    path.write_text(json.dumps({"experiments": [{"requests": exported}]}))
    return path


def test_times_and_rates_by_hand(tmp_path: Path) -> None:
    """Two requests, sent at 0 and 100 ms; tokens at 50, 60, 80 and at 130, 150, 200 ms."""
    path = profile(
        tmp_path / "p.json",
        (0, [(50, response(5, cached=8)), (60, response(6)), (80, response(7, "length", 3))]),
        (100, [(130, response(5, cached=16)), (150, response(6)), (200, response(7, "stop", 3))]),
    )
    level = summarise(read_profile(path), 2)
    # First tokens after 50 and 30 ms; gaps of 10, 20, 20 and 50 ms.
    assert level.ttft_ms == pytest.approx({"p50": 40.0, "p90": 48.0, "p99": 49.8})
    assert level.itl_ms == pytest.approx({"p50": 20.0, "p90": 41.0, "p99": 49.1})
    assert level.request_ms["p50"] == pytest.approx(90.0)  # 80 and 100
    assert level.seconds == pytest.approx(0.2)
    assert level.output_tokens_per_second == pytest.approx(30.0)
    assert level.requests_per_second == pytest.approx(10.0)
    # 2 tokens in 30 ms and 2 in 70 ms: 66.67 and 28.57 tokens a second.
    assert level.interactivity == pytest.approx((2 / 0.03 + 2 / 0.07) / 2)
    assert (level.input_tokens, level.cached_tokens) == (40.0, 12.0)


def test_several_tokens_in_a_response_share_its_wait(tmp_path: Path) -> None:
    outputs = [
        (10, response([1, 2], cached=0)),
        (40, response([3, 4, 5])),
        (50, response(6, "stop", 6)),
    ]
    level = summarise(read_profile(profile(tmp_path / "p", (0, outputs))), 1)
    # 10 ms for each of three tokens that came together after 30 ms, then 10 ms.
    assert level.itl_ms == pytest.approx({"p50": 10.0, "p90": 10.0, "p99": 10.0})
    assert level.output_tokens_per_second == pytest.approx(6 / 0.05)
    assert level.interactivity == pytest.approx(4 / 0.04)


def test_the_final_flag_alone_is_no_token(tmp_path: Path) -> None:
    outputs = [(10, response(1, cached=0)), (30, response(2, "length", 2)), (900, response(0))]
    (trace,) = read_profile(profile(tmp_path / "p", (0, outputs)))
    assert trace.received_ns.tolist() == [10 * MS, 30 * MS]
    assert trace.tokens.tolist() == [1, 1]


def test_a_reason_without_tokens_is_no_token(tmp_path: Path) -> None:
    """Its empty output_ids are exported as 0."""
    outputs = [(10, response(1, cached=0)), (30, response(2)), (900, response(0, "stop", 2))]
    (trace,) = read_profile(profile(tmp_path / "p", (0, outputs)))
    assert trace.received_ns.tolist() == [10 * MS, 30 * MS]


def test_one_token_has_no_gap(tmp_path: Path) -> None:
    path = profile(tmp_path / "p", (0, [(10, response(1, "length", 1, cached=0))]))
    level = summarise(read_profile(path), 1)
    assert (level.itl_ms, level.interactivity) == ({}, None)


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ([(1, response(1))], "finish_reason"),
        ([(1, response([1, 2])), (2, response(3, "stop", 1))], "expected 1 output tokens"),
    ],
)
def test_profiles_of_another_protocol(tmp_path: Path, outputs: Any, sentence: str) -> None:
    with pytest.raises(DeploymentError, match=sentence):
        read_profile(profile(tmp_path / "p", (0, outputs)))


def test_not_a_profile(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"expected a profile export .* in none\.json"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "levels"),
    [("4", [4]), ("1,2,8", [1, 2, 8]), ("1:4", [1, 2, 3, 4]), ("2:8:3", [2, 5, 8])],
)
def test_concurrencies(text: str, levels: list[int]) -> None:
    assert parse_concurrency(text) == levels


@pytest.mark.parametrize("text", ["", "0", "4:1", "1:2:3:4", "1:2:0", "a", "1,,2"])
def test_concurrencies_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected concurrencies"):
        parse_concurrency(text)


@pytest.mark.parametrize(
    "values", [{"input_tokens": 0}, {"output_tokens": 0}, {"shared_prefix": 128}, {"vocab_size": 0}]
)
def test_workloads_that_are_none(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Workload(**values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def analyzer() -> tuple[Path, dict[str, str]]:
    """Made on first use. A machine that can install nothing skips, with what it lacks."""
    try:
        return find_perf_analyzer(DEFAULT_ENVIRONMENT, print)
    except DeploymentError as error:
        pytest.skip(error.message)


@pytest.mark.server
def test_perf_for_real(
    analyzer: object, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["perf", "--url", server.grpc, "--concurrency", "1,3", "--requests", "9"]
    asked += ["--input_tokens", "20", "--output_tokens", "6", "--shared-prefix", "8"]
    asked += ["--json", str(tmp_path / "perf.json"), "--plot", str(tmp_path / "perf.png")]
    assert main(asked) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    report = json.loads(lines[-1])
    assert report == json.loads((tmp_path / "perf.json").read_text())
    assert (tmp_path / "perf.png").read_bytes().startswith(b"\x89PNG")
    assert len(lines) == 4  # head, two levels, the object
    assert "concurrency 1: " in shown.err
    assert "concurrency 3: " in shown.err
    assert [level["concurrency"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        assert level["requests"] == 9
        assert level["input_tokens"] == 20.0
        rate = level["output_tokens_per_second"] / level["requests_per_second"]
        assert rate == pytest.approx(6.0)  # tokens of a request
        assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"] < 60_000
        assert level["ttft_ms"]["p50"] < level["request_ms"]["p50"]
        assert level["itl_ms"]["p50"] > 0


@pytest.mark.server
def test_prompts_of_text_have_the_tokens_asked_for(analyzer: object, server: Server) -> None:
    """The echo model's tokens are bytes, so 100 tokens are 20 words of four letters and a space."""
    workload = Workload(input_tokens=100, output_tokens=2, prompt="text", shared_prefix=50)
    with GrpcClient(server.grpc) as client:
        (level,) = measure(client, workload, [1], requests=2, progress=print)
    assert level.input_tokens == 100.0


@pytest.mark.server
def test_the_real_export_of_each_form_of_stream(
    analyzer: tuple[Path, dict[str, str]], server: Server, tmp_path: Path
) -> None:
    """A plain stream, the final flag alone, the reason alone, two tokens a response."""
    program, variables = analyzer

    def entry(behaviour: int) -> dict[str, Any]:
        values: dict[str, list[int]] = {
            "input_ids": [65, behaviour],
            "max_tokens": [5],
            "stream": [True],
        }
        return {name: {"content": v, "shape": [len(v)]} for name, v in values.items()}

    data, path = tmp_path / "in.json", tmp_path / "out.json"
    data.write_text(json.dumps({"data": [entry(b) for b in (66, 303, 307, 308)]}))
    command = [str(program), "-m", "deepseek_v41", "-u", server.grpc, "-i", "grpc", "--streaming"]
    command += ["--async", "--input-data", str(data), "--request-count", "4"]
    command += ["--concurrency-range", "1", "--profile-export-file", str(path)]
    subprocess.run(command, env=variables, check=True, timeout=60, stdout=subprocess.DEVNULL)
    tokens = [trace.tokens.tolist() for trace in read_profile(path)]
    assert tokens == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [2, 2, 1]]


@pytest.mark.server
def test_a_refused_load_says_why(analyzer: object, server: Server) -> None:
    workload = Workload(input_tokens=4, vocab_size=2**31 - 1)  # ids beyond the echo model's 1000
    with GrpcClient(server.grpc) as client, pytest.raises(DeploymentError, match="below 1000"):
        list(measure(client, workload, [1], requests=2, progress=print))
