"""The demonstration against the real server, and the golden tokens of the exact mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.cli import main as build
from client import Chat, GenerateRequest, GrpcClient, HttpClient
from engine.directory import Engine
from examples import demo
from tests.server.deployment import GOLDEN, PROMPT, Deployment

pytestmark = pytest.mark.server

PAGE = 32  # two windows of 16


def test_golden_tokens_with_bounded_replay_off(engine: Path) -> None:
    """The exact mode has other golden tokens than the default one; over both protocols."""
    expected = GOLDEN["greedy_from_20"].tolist()
    assert expected != GOLDEN["greedy_from_20_replay"].tolist()
    deployment = Deployment(engine, "--dtype=float64", "--no-swa-bounded-replay")
    try:
        server = deployment.wait_until_ready()
        asked = {"input_ids": PROMPT, "max_tokens": len(expected), "end_id": -1}
        (answer,) = list(server.stream(**asked))
        assert server.generate(**asked)["output_ids"] == answer["output_ids"] == expected
    finally:
        deployment.end()


@pytest.fixture(scope="module")
def tinyflash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The shipped checkpoint, served."""
    engine = tmp_path_factory.mktemp("demo") / "engine"
    made = ["engine", f"--checkpoint_dir={demo.CHECKPOINT}", f"--output_dir={engine}"]
    assert build(made) == 0
    assert Engine.open(engine).config.sliding_window * 2 == PAGE
    deployment = Deployment(engine, "--speculative")
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def metrics(server: Deployment) -> str:
    return f"http://127.0.0.1:{server.metrics}/metrics"


def test_the_demonstration(tinyflash: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    """The second turn hits all whole pages of the first and its answer, and replays one window."""
    before = demo.counted(metrics(tinyflash), output=2)  # the server's own tokens at start
    turns = demo.converse(f"127.0.0.1:{tinyflash.grpc}", metrics(tinyflash), 400)
    problem, found, again, talk = turns
    assert [turn.cached for turn in (problem, found, talk)] == [0, 0, 0]
    assert [turn.replayed for turn in turns] == [0, 0, 16, 0]
    assert again.cached % PAGE == 0
    assert found.prompt - PAGE < again.cached < again.prompt
    assert all(turn.output > 1 and turn.first_token > 0 and turn.rest > 0 for turn in turns)
    total = {kind: value - before[kind] for kind, value in demo.counted(metrics(tinyflash)).items()}
    assert total == {
        "prompt": sum(turn.prompt for turn in turns),
        "cached": again.cached,
        "replayed": 16,
        "output": sum(turn.output for turn in turns),
        "accepted": sum(turn.accepted for turn in turns),
    }
    # At least one token of a step is the model's own, and a block has five drafts.
    assert problem.output / 2 < problem.accepted <= problem.output * 5 / 6
    verdicts = [line.split()[1].rstrip(":") for line in capsys.readouterr().out.splitlines()
                if "→" in line]  # fmt: skip
    assert verdicts == ["right" if turn.is_right else "WRONG" for turn in turns]
    assert f"{again.cached:,} of its {again.prompt:,} prompt tokens" in " ".join(
        demo.second_turn(found, again).split()
    )
    with pytest.raises(demo.DemoError, match="hit nothing"):
        demo.second_turn(found, found)


def test_a_wrong_answer_is_called_wrong(
    tinyflash: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = demo.Asked("title", "Hello!", "Hello!", "no model says this", str)
    with GrpcClient(f"127.0.0.1:{tinyflash.grpc}") as client:
        turn = demo.ask(Chat(client, max_tokens=2), asked, metrics(tinyflash))
    assert not turn.is_right
    assert "→ WRONG: expected no model says this, got " in capsys.readouterr().out
    assert demo.table([turn]).endswith("WRONG")


def test_a_request_without_drafts_has_the_same_answer(tinyflash: Deployment) -> None:
    def asked(speculative: bool | None) -> GenerateRequest:
        messages = [{"role": "user", "content": demo.questions(600)[0].prompt}]
        return GenerateRequest(messages=messages, max_tokens=12, speculative=speculative)

    for client in (
        GrpcClient(f"127.0.0.1:{tinyflash.grpc}"),
        HttpClient(f"127.0.0.1:{tinyflash.http}"),
    ):
        with client:
            plain, drafted, same = (client.generate(asked(s)) for s in (False, None, True))
        assert plain.output_ids.tolist() == drafted.output_ids.tolist() == same.output_ids.tolist()
        assert plain.num_accepted_drafts == 0
        assert drafted.num_accepted_drafts == same.num_accepted_drafts
        assert drafted.num_accepted_drafts is not None
        assert drafted.num_accepted_drafts > 0


def test_the_questions_have_known_answers() -> None:
    """The document states both facts; the second question does not repeat it."""
    problem, found, again, _ = demo.questions(600)
    assert problem.expected.isdecimal()
    for asked in (found, again):
        assert f" {asked.expected}" in found.prompt
    assert found.expected != again.expected
    assert len(again.prompt) < 100


def test_metrics_that_show_nothing_end_the_demonstration(
    tinyflash: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "METRICS_SECONDS", 0.2)
    with pytest.raises(demo.DemoError, match="did not show 1000000 tokens"):
        demo.counted(metrics(tinyflash), output=1_000_000)


@pytest.mark.parametrize(("verdicts", "status"), [((True, True), 0), ((True, False), 1)])
def test_a_wrong_answer_fails_the_demonstration(
    verdicts: tuple[bool, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [demo.Turn("question", right, 9, 3, 3, 2, 1, 0.1, 0.1) for right in verdicts]
    monkeypatch.setattr(demo, "build_engine", lambda engine: engine)
    monkeypatch.setattr(demo, "served", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(demo, "converse", lambda *_: [turns[0], *turns])
    assert demo.main() == status
