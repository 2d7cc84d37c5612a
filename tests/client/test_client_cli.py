"""The command as users run it, against the real server: output, exit codes, interruption."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from client.cli import main
from tests.client.real_server import ROOT, Server, assert_stops, free_address

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
    options.append("--no-speculative")
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
        "speculative": False,
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


# -- refused before the server is asked ------------------------------------------------------------


@pytest.mark.parametrize("command", [["eval", "--task=arithmetic"], ["perf"]])
def test_a_report_that_cannot_be_written_is_refused_first(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "no folder" / "x.json", tmp_path / "file" / "x.json"):
        assert main([*command, f"--url={free_address()}", f"--json={path}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("dsv41-client: expected a file in an existing folder that can be")
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["p.foo", "p"])
def test_a_picture_of_no_format(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perf", f"--url={free_address()}", f"--plot={tmp_path / name}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsv41-client: expected a picture that ends with one of")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [["--message="], ["--message=x", "--message= "], []])
def test_empty_messages(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None at all: a pipe that holds nothing."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["chat", f"--url={free_address()}", *options]) == 2
    assert capsys.readouterr().err == (
        "dsv41-client: expected messages with text, got an empty one; write one\n"
    )


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["ids.npy", "ids.txt"])
def test_a_file_that_holds_no_ids(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    code = main(["generate", f"--url={free_address()}", "--ids-file", str(tmp_path / name)])
    error = capsys.readouterr().err
    if (name, content) == ("ids.txt", b""):  # an empty prompt is the server's to refuse
        assert (code, "[unavailable]" in error) == (1, True)
        return
    assert code == 2
    assert error.startswith("dsv41-client: expected a readable file of token ids at")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["chat", "--message=x"], ["generate", "--text=x"]])
def test_an_error_before_any_token_prints_nothing_but_itself(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--url={free_address()}"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("dsv41-client: [unavailable] expected a server at")


def test_lengths_of_word_problems_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["eval", "--task=arithmetic", "--document-tokens", "256", "320"]
    assert main([*asked, f"--url={free_address()}"]) == 2
    assert "expected document tokens with the task retrieval only" in capsys.readouterr().err


def test_without_tritonclient_grpc_says_so_and_http_works(server: Server, tmp_path: Path) -> None:
    """A package of that name which cannot be imported, before the real one on the path."""
    (tmp_path / "tritonclient").mkdir()
    (tmp_path / "tritonclient" / "__init__.py").write_text("raise ImportError('not installed')")
    for protocol, code, error in (
        ("grpc", 2, "pip install 'tritonclient[grpc,http]'"),
        ("http", 0, ""),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "client.cli", "health", *address(server, protocol)],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert error in done.stderr
        assert done.stderr.count("\n") == bool(error)
