"""The command as users run it, against the real server: output, exit codes, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from client.cli import main
from tests.client.real_server import Server, assert_stops, free_address

pytestmark = pytest.mark.server

PROTOCOLS = ("grpc", "http")


def address(server: Server, protocol: str) -> list[str]:
    return ["--protocol", protocol, "--url", getattr(server, protocol)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_text(
    server: Server, protocol: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", *address(server, protocol), "--text", "héy ", "--max_tokens", "10", *more]
    assert main(asked) == 0
    shown = capsys.readouterr()
    assert shown.out == "héy héy \n"
    for part in ("input 5", "cached 0", "output 10", "finish length", "total"):
        assert part in shown.err
    assert ("TTFT" in shown.err) is (not more)


@pytest.mark.parametrize(
    ("name", "content"), [("ids.npy", None), ("ids.txt", "65, 66\n306"), ("ids", "65 66 306 ")]
)
def test_ids_in_and_ids_out(
    server: Server,
    tmp_path: Path,
    name: str,
    content: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is None:
        np.save(tmp_path / name, np.array([65, 66, 306], np.int32))
    else:
        (tmp_path / name).write_text(content)
    asked = ["generate", *address(server, "grpc"), "--ids-file", str(tmp_path / name)]
    assert main([*asked, "--max-tokens=4"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "65 66 65 66 \n"
    assert "cached 64" in shown.err


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_json_is_the_only_output(
    server: Server, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", *address(server, protocol), "--input_ids", "97,98", "--end_id", "98"]
    assert main([*asked, "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert 0 < answer.pop("time_to_first_token_ms") <= answer.pop("seconds") * 1e3
    assert answer == {
        "text_output": "ab",
        "output_ids": [97, 98],
        "finish_reason": "stop",
        "num_input_tokens": 2,
        "num_output_tokens": 2,
        "cached_tokens": 0,
    }
    assert shown.err == ""


def test_sampling_options_reach_the_server(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", *address(server, "grpc"), "--input-ids", "305", "--json", "--no-stream"]
    options = ["--temperature", "0.5", "--top_k=3", "--top-p", "0.25", "--seed", "7"]
    assert main([*asked, *options, "--request_id", "mine"]) == 0
    described = json.loads(json.loads(capsys.readouterr().out)["text_output"])
    assert described["id"] == "mine"
    values = {name: tensor[2][0] for name, tensor in described["inputs"].items()}
    assert values == {
        "input_ids": 305,
        "max_tokens": 16,
        "stream": False,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "seed": 7,
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_server_error_is_one_sentence_and_exit_1(
    server: Server, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *address(server, protocol), "--input-ids", "2000"]) == 1
    error = capsys.readouterr().err
    assert error == "dsv41-client: [invalid_argument] token ids must be below 1000, got 2000\n"


def test_error_in_mid_stream_keeps_what_was_printed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *address(server, "http"), "--input-ids", "65,300"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "65 65 65 \n"
    assert shown.err == "dsv41-client: [internal] asked to fail after three tokens\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--text", "a", "--top-k", "3000000000"], "expected top_k as a whole number"),
        (["--input-ids", "1,x"], "expected token ids as whole numbers"),
        (["--ids-file", "/nowhere/ids.npy"], "expected a readable file of token ids"),
        (["--text", "a", "--timeout", "soon"], "--timeout"),
        (["--text", "a", "--input-ids", "1"], "not allowed with"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_exit_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["generate", *options])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_interrupt_cancels_on_the_server(server: Server, protocol: str) -> None:
    command = [sys.executable, "-m", "client.cli", "generate", *address(server, protocol)]
    with subprocess.Popen(
        [*command, "--input-ids", "65,302", "--max-tokens", "1000"],  # 50 s
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(6) == "65 65 "
        running.send_signal(signal.SIGINT)
        assert running.wait(10) == 130
        assert "finish cancelled" in running.stderr.read()
    assert_stops(server)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_health(server: Server, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", *address(server, protocol), "--deep"]) == 0
    states = [line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert states == [
        ["server is live", "yes"],
        ["server is ready", "yes"],
        ["model deepseek_v41 is ready", "yes"],
        ["one token was generated", "yes"],
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_health_where_nobody_listens(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = free_address()
    assert main(["health", "--protocol", protocol, "--url", nobody, "--timeout", "3"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("NO") == 3
    assert nobody in shown.err
    assert shown.err.count("\n") == 1
