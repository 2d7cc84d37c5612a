"""Conversations and evaluation on the real server: an untrained TinyFlash with its tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from grpc import insecure_channel
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.cli import main as build
from client import Chat, DeploymentError, FinishReason, GenerateRequest, GrpcClient, HttpClient
from client.chat import converse
from client.cli import main
from engine.chat_sections import CHAT_SECTIONS_NAME, ChatSections
from examples.tinyflash import evaluate
from examples.tinyflash.arithmetic import heldout_arithmetic
from examples.tinyflash.tokenizer import TOKENIZER_FILE, encoder
from examples.tinyflash.tools import TOOLS
from python_backend.text import chat
from tests.server.deployment import MODEL, ROOT, Deployment, add_tensor

pytestmark = pytest.mark.server

PAGE = 32  # two windows of 16
SECTIONS = ChatSections("Of these:\n{schemas}\n{}", "As {schema} says.")
LONG = "Please count the red and the green lamps along the harbor road, one after the other. " * 4
CALL = {"id": "x", "function": {"name": "lookup", "arguments": {"entity": "Harbor Lamp"}}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([{"role": "user", "content": LONG}], {}),
    (
        [
            {"role": "system", "content": "Be brief. Grüße, 世界 🙂"},
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2 = 4"},
            {"role": "user", "content": "And now?"},
        ],
        {"thinking": True, "reasoning_effort": 60},
    ),
    (
        [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "x", "content": "4729"},
        ],
        {"tools": TOOLS},
    ),
    (
        [
            {"role": "system", "content": LONG, "response_format": {"type": "string"}},
            {"role": "user", "content": "Now."},
        ],
        {},
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinyflash")
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    config = ROOT / "examples" / "tinyflash" / "config.json"
    made = ["init", f"--config={config}", f"--output_dir={checkpoint}"]
    assert build([*made, f"--tokenizer={TOKENIZER_FILE}"]) == 0
    (checkpoint / CHAT_SECTIONS_NAME).write_text(json.dumps(asdict(SECTIONS)))
    assert build(["engine", f"--checkpoint_dir={checkpoint}", f"--output_dir={engine}"]) == 0
    return engine


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Deployment]:
    # In float64, because the last bits of float32 depend on the number of threads.
    deployment = Deployment(engine, "--dtype=float64")
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


@pytest.fixture(scope="module")
def grpc(server: Deployment) -> Iterator[GrpcClient]:
    with GrpcClient(f"127.0.0.1:{server.grpc}") as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Deployment) -> HttpClient:
    return HttpClient(f"127.0.0.1:{server.http}")


@pytest.mark.parametrize(("messages", "options"), CONVERSATIONS)
def test_messages_are_the_renderers_ids(
    grpc: GrpcClient, http: HttpClient, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """The ids find every whole page that the messages left in the prefix cache, so they are equal;
    both protocols. The sections have the checkpoint's words."""
    text = chat.render(
        messages,
        mode="thinking" if options.get("thinking") else "chat",
        effort=options.get("reasoning_effort", chat.DEFAULT_EFFORT),
        tools=options.get("tools", ()),
        sections=SECTIONS,
    )
    ids = encoder().encode(text)
    assert len(ids) > 2 * PAGE
    first = grpc.generate(GenerateRequest(messages=messages, max_tokens=1, **options))
    assert first.num_input_tokens == len(ids)
    whole_pages = (len(ids) - 1) // PAGE * PAGE
    again = grpc.generate(GenerateRequest(input_ids=ids, max_tokens=1))
    assert again.cached_tokens == whole_pages
    by_http = http.generate(GenerateRequest(messages=messages, max_tokens=1, **options))
    assert (by_http.num_input_tokens, by_http.cached_tokens) == (len(ids), whole_pages)


def test_messages_and_their_ids_get_the_same_answer(grpc: GrpcClient) -> None:
    """Less than a page, so that neither finds the other's."""
    messages = [{"role": "user", "content": "How are you?"}]
    ids = encoder().encode(chat.render(messages))
    assert len(ids) <= PAGE
    asked: dict[str, Any] = {"max_tokens": 12, "end_id": -1}
    by_messages = grpc.generate(GenerateRequest(messages=messages, **asked))
    by_ids = grpc.generate(GenerateRequest(input_ids=ids, **asked))
    assert by_messages.output_ids.tolist() == by_ids.output_ids.tolist()
    assert by_messages.text_output == by_ids.text_output


def test_the_wait_to_be_read_counts(server: Deployment) -> None:
    """On one stream, and so in order: a text of two megabytes, and a conversation padded with
    blanks, whose millisecond has passed when its turn comes."""
    padded = json.dumps(CONVERSATIONS[0][0])[:-1] + " " * 70_000 + "]"
    asked: list[dict[str, Any]] = [
        {"text_input": "word " * 400_000, "max_tokens": 1},
        {"messages": padded, "max_tokens": 1, "timeout": 1_000},
        {"messages": padded, "max_tokens": 1},
    ]
    requests = []
    for values in asked:
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        for name, value in values.items():
            add_tensor(request, name, value)
        requests.append(request)
    with insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter(requests), timeout=60))
    said = [answer.error_message.partition("]")[0] for answer in answers]
    assert sorted(said) == ["", "[deadline_exceeded", "[invalid_argument"]


def test_a_second_turn_hits_the_first(grpc: GrpcClient) -> None:
    talk = Chat(grpc, system="Be brief.", max_tokens=6)
    first = talk.ask(LONG).result()
    assert first.cached_tokens is not None
    assert first.num_input_tokens is not None
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    with talk.ask("Again?") as answer:
        chunks = list(answer)
    assert chunks[0].cached_tokens is not None
    assert chunks[0].cached_tokens >= first.num_input_tokens // PAGE * PAGE > first.cached_tokens
    assert talk.messages[-1]["content"] == "".join(chunk.text_output for chunk in chunks)
    assert len(talk.messages) == 5


def test_a_cancelled_answer_stays_in_the_history_as_far_as_it_came(grpc: GrpcClient) -> None:
    talk = Chat(grpc, max_tokens=900, thinking=True, seed=1, temperature=1.0)
    answer = talk.ask("Speak.")
    came = next(answer).text_output + next(answer).text_output
    answer.cancel()
    result = answer.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert talk.messages[0]["content"] == "Speak."
    kept = talk.messages[1]
    assert (kept["reasoning_content"] + kept["content"]).startswith(came.replace("</think>", ""))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"messages": "[{"}, "messages as a JSON list, but Expecting property name"),
        ({"messages": '[{"role": "judge", "content": "x"}]'}, 'got "judge"; rename it'),
        ({"messages": '[{"role": "user"}]'}, "content as a string, got nothing; send text"),
        ({"messages": "[]", "text_input": "a"}, "exactly one of .*, got text_input and messages"),
        ({"text_input": "a", "thinking": True}, "thinking with messages only"),
    ],
)
def test_bad_chats_over_http(server: Deployment, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match=rf"^400 \[invalid_argument\] expected .*{sentence}"):
        server.generate(**values)


def test_bad_chats_over_grpc(grpc: GrpcClient) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(DeploymentError, match="expected the last message to be") as caught:
        grpc.generate(GenerateRequest(messages=messages))
    assert caught.value.code == "invalid_argument"


# -- dsv41-client chat ---------------------------------------------------------------------------


def test_messages_on_the_command_line(
    server: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"--url=127.0.0.1:{server.grpc}"
    asked = ["chat", url, "--max-tokens=3", "--message", LONG, "--message=More.", "--thinking"]
    assert main(asked) == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("input ")]
    assert len(lines) == 2
    first, second = (dict(zip(w[::2], w[1::2], strict=True)) for w in map(str.split, lines))
    assert first["output"] == second["output"] == "3"
    assert int(second["cached"]) >= int(first["input"]) // PAGE * PAGE - PAGE > 0


def test_a_terminal_conversation(grpc: GrpcClient, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    talk = Chat(grpc, max_tokens=2, top_k=-1)
    assert converse(talk, StringIO("\nhello\n"), say=said.append)
    assert said[1].startswith("dsv41-client: [invalid_argument] expected top_k")
    assert talk.messages == []  # no answer, no trace
    talk = Chat(grpc, max_tokens=2)
    assert converse(talk, StringIO("hello\n/exit\nnever asked\n"), say=said.append)
    assert len(talk.messages) == 2
    assert "output 2" in said[-1]
    assert capsys.readouterr().out.count("> ") == 5


def test_interrupt_cancels_the_answer_and_not_the_program(server: Deployment) -> None:
    terminal, child_side = pty.openpty()
    command = [sys.executable, "-m", "client.cli", "chat", f"--url=127.0.0.1:{server.grpc}"]
    child = subprocess.Popen(
        [*command, "--max-tokens=5000"],
        cwd=ROOT, stdin=child_side, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout
    assert child.stderr
    assert child.stderr.readline().startswith("Type a message")
    os.write(terminal, b"hello\n")
    assert child.stdout.read(2) == "> "
    while server.metric("dsv41_num_requests_running") == 0:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    assert "finish cancelled" in child.stderr.readline()
    assert server.seconds_until_empty(1.0) < 1.0
    os.write(terminal, b"/exit\n")
    assert child.wait(10) == 0
    os.close(terminal)
    os.close(child_side)


def test_a_pipe_is_one_message(server: Deployment) -> None:
    command = [sys.executable, "-m", "client.cli", "chat", f"--url=127.0.0.1:{server.grpc}"]
    done = subprocess.run(
        [*command, "--max-tokens=1"], cwd=ROOT, input="one\ntwo\n", capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens = len(encoder().encode(chat.render([{"role": "user", "content": "one\ntwo"}])))
    assert done.stderr.startswith(f"input {tokens} ")


# -- dsv41-client eval ---------------------------------------------------------------------------


def test_eval_and_evaluate_agree(
    server: Deployment, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over gRPC and in process: the same questions, the same answers, the same report."""
    asked = ["--task=arithmetic", "--limit=4", "--seed=3", "--max-tokens=8"]
    url = f"--url=127.0.0.1:{server.grpc}"
    assert main(["eval", url, *asked, "--json", str(tmp_path / "served.json")]) == 0
    assert "unseen templates" in capsys.readouterr().out
    local = [f"--engine={engine}", "--dtype=float64", "--json", str(tmp_path / "local.json")]
    assert evaluate.main([*asked, *local, "--compare", str(tmp_path / "served.json")]) == 0
    assert "+0.00 %" in capsys.readouterr().out

    served, local_report = (
        json.loads((tmp_path / name).read_text()) for name in ("served.json", "local.json")
    )
    assert served["records"] == local_report["records"]
    assert (served["n"], served["seed"], served["num_cut_short"]) == (4, 3, 4)
    assert [record["question"] for record in served["records"]] == [
        hashlib.sha256(question.prompt.encode()).hexdigest()[:16]
        for question in heldout_arithmetic(4, 3)
    ]


def test_eval_of_retrieval(server: Deployment, tmp_path: Path) -> None:
    asked = ["eval", "--task=retrieval", "--limit=2", "--document-tokens", "128", "192"]
    report = tmp_path / "report.json"
    url = f"--url=127.0.0.1:{server.grpc}"
    assert main([*asked, url, "--max-tokens=2", "--json", str(report)]) == 0
    made = json.loads(report.read_text())
    assert made["n"] == 2
    assert all(128 <= record["num_input_tokens"] <= 200 for record in made["records"])


def test_eval_needs_a_server_and_two_questions(
    server: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--task=arithmetic", "--limit=2", "--url=127.0.0.1:9"]) == 1
    assert "[unavailable]" in capsys.readouterr().err
    url = f"--url=127.0.0.1:{server.grpc}"
    assert main(["eval", "--task=arithmetic", "--limit=1", url]) == 2
    assert "at least 2 questions, got 1" in capsys.readouterr().err
