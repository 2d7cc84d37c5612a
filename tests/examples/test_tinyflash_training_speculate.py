"""Speculative generation on the golden model, whose float64 continuation is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.cli import main as build
from engine.network.network import Network
from examples.tinyflash import speculate
from examples.tinyflash.speculate import Generation, generate

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "config.json"
Golden = Mapping[str, torch.Tensor]
NO_END = -1


@pytest.mark.parametrize("drafts", [False, True])
def test_the_text_is_the_golden_continuation(
    network64: Network, golden_of: Callable[[bool], Golden], drafts: bool
) -> None:
    """With drafts or without, and beside requests of other lengths that end earlier."""
    golden = golden_of(True)
    prompt = golden["tokens"][:20].numpy().astype(np.int32)
    expected = golden["greedy_from_20_replay"].tolist()
    prompts = [prompt[:9], prompt, prompt[:14]]
    made = generate(network64, prompts, max_tokens=24, end_id=NO_END, drafts=drafts)
    assert made.outputs[1] == expected
    assert [len(output) for output in made.outputs] == [24, 24, 24]


def test_drafts_change_no_text_and_the_end_ends_it(
    network64: Network, golden_of: Callable[[bool], Golden]
) -> None:
    golden = golden_of(True)
    prompt = golden["tokens"][:20].numpy().astype(np.int32)
    expected = golden["greedy_from_20_replay"].tolist()
    end = expected[10]
    for drafts in (False, True):
        made = generate(network64, [prompt], max_tokens=24, end_id=end, drafts=drafts)
        assert made.outputs[0] == expected[: expected.index(end) + 1]


def test_acceptance_is_counted_by_position() -> None:
    """Of ten verifications four took no draft, three one, two two, one all three."""
    made = Generation([], [4, 3, 2, 1])
    assert made.acceptance_by_position == pytest.approx([0.6, 0.3, 0.1])
    assert made.mean_accepted == pytest.approx(1.0)


def test_answers_of_one_token_verify_nothing() -> None:
    made = Generation([[5]], [0, 0, 0])
    assert (made.mean_accepted, made.acceptance_by_position) == (None, [])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained TinyFlash for sequences of at most 100 tokens."""
    folder = tmp_path_factory.mktemp("speculate")
    assert build(["init", f"--config={CONFIG}", f"--output_dir={folder / 'c'}"]) == 0
    made = ["engine", f"--checkpoint_dir={folder / 'c'}", f"--output_dir={folder / 'e'}"]
    assert build([*made, "--max_seq_len=100"]) == 0
    return folder / "e"


@pytest.mark.parametrize("tokens", [-1, 0, 101])
def test_tokens_that_the_engine_has_no_room_for(
    engine: Path, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speculate.main([f"--engine={engine}", f"--max-tokens={tokens}"]) == 2
    assert f"max_seq_len = 100, got {tokens}" in capsys.readouterr().err


def test_one_token_is_reported_without_nan(engine: Path, tmp_path: Path) -> None:
    asked = [f"--engine={engine}", "--limit=2", "--max-tokens=1"]
    assert speculate.main([*asked, f"--json={tmp_path / 'r.json'}"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    made = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert (made["accepted_per_verification"], made["acceptance_by_position"]) == (None, [])
    with pytest.raises(ValueError, match=r"expected results of speculate in .*r\.json"):
        speculate.read(tmp_path / "r.json")


def test_an_interrupt_is_one_sentence(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speculate, "generate", interrupted)
    assert speculate.main([f"--engine={engine}", "--limit=2", "--max-tokens=8"]) == 130
    assert capsys.readouterr().err == "speculate: interrupted\n"


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before the engine, which does not exist, is missed."""
    assert speculate.main([f"--engine={tmp_path / 'none'}", f"--json={tmp_path}"]) == 2
    assert "expected a file in an existing folder" in capsys.readouterr().err
