"""Training in pieces: exactly as in one, over Ctrl-C too; what cannot work is refused at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import islice
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.network.engram import EngramHash
from examples.tinyflash.training import drafter, export, loop
from examples.tinyflash.training.drafter import DrafterTrainer
from examples.tinyflash.training.initial import initial_weights
from examples.tinyflash.training.loop import Trainer
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.pieces import (
    exit_code,
    load_weights_parts,
    save_weights,
    saved_state,
    train,
)
from examples.tinyflash.training.plan import Batches, Phase, Plan, base_plan

PLAN = Plan(
    steps=4, tokens_per_batch=512, phases=(Phase(1.0, 512, "short"),),
    quantized_from=0.0, decay_from=0.5, warmup_steps=2,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def test_drafting_in_two_pieces_equals_one_run(config: ModelConfig, tmp_path: Path) -> None:
    weights = initial_weights(config, 0)

    def piece(out: Path, steps: int) -> DrafterTrainer:
        trainer = DrafterTrainer(config, Parameters(config, weights, "cpu"), PLAN, "cpu")
        state = saved_state(out, PLAN)
        if state is not None:
            trainer.restore(state)
        batches = Batches(PLAN, trainer.step, 0, config, trainer.engram)
        train(trainer, islice(batches, steps), out, minutes=10)
        return trainer

    whole = piece(tmp_path / "whole", 4)
    assert piece(tmp_path / "parts", 2).step == 2
    second = piece(tmp_path / "parts", 2)
    assert second.step == whole.step == 4
    for path, leaf in whole.parameters.leaves.items():
        assert torch.equal(leaf, second.parameters.leaves[path]), path
    # The anchors of a fifth step are the same too.
    states = [one.state()["generator"] for one in (whole, second)]
    assert torch.equal(*states)


def test_ctrl_c_lets_the_step_finish_and_saves(config: ModelConfig, tmp_path: Path) -> None:
    class Interrupted(Trainer):
        def _prepare(self, step: int) -> None:
            if step == 1:  # as a terminal does: to all processes
                for process in [os.getpid(), *(p.pid for p in multiprocessing.active_children())]:
                    os.kill(process or 0, signal.SIGINT)
            super()._prepare(step)

    before = signal.getsignal(signal.SIGINT)
    trainer = Interrupted(config, PLAN, initial_weights(config, 0), "cpu")
    with (
        Batches(PLAN, 0, 1, config, trainer.engram) as batches,
        pytest.raises(KeyboardInterrupt, match=r"after step 2/4, saved in .*/out"),
    ):
        train(trainer, batches, tmp_path / "out", minutes=10)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is before
    state = saved_state(tmp_path / "out", PLAN)
    assert state is not None
    assert state["step"] == 2
    for path, leaf in trainer.parameters.leaves.items():
        assert torch.equal(leaf, state["leaves"][path]), path


@pytest.mark.parametrize("stop", ["after step 2/4", ""])
def test_an_interrupted_command_says_what_is_saved(
    stop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise KeyboardInterrupt(stop) if stop else KeyboardInterrupt

    assert exit_code("loop", work) == 130
    said = stop or "before this piece was saved"
    assert capsys.readouterr().err == f"loop: interrupted {said}\n"


def test_workers_survive_ctrl_c(config: ModelConfig) -> None:
    engram = EngramHash(config, initial_weights(config, 0).token_class)
    with Batches(PLAN, 0, 2, config, engram) as batches:
        first = next(iter(batches))
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
        assert len(list(batches)) == 4
    assert first.max_context == 512
    assert multiprocessing.active_children() == []


LOOP = ("--steps", "8", "--workers", "0", "--device", "cpu")


def refused(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> str:
    """The one sentence with which a command ends."""
    main = {"loop": loop.main, "drafter": drafter.main, "export": export.main}[command]
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"{command}: ")
    return said.err


def test_out_is_checked_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    no_checkpoint = ("--checkpoint", tmp_path / "none")
    for out in (file, file / "below"):
        assert f"{file} is a file" in refused(capsys, "loop", "--out", out, *LOOP)
        said = refused(capsys, "drafter", "--out", out, *no_checkpoint, *LOOP)
        assert f"{file} is a file" in said
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_parent_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert f"{closed} is not writable" in refused(capsys, "loop", "--out", closed / "run", *LOOP)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--minutes", "0"), ("--minutes", "nan"), ("--minutes", "-1"), ("--workers", "-1")],
)
def test_options_that_cannot_work_are_wrong_usage(option: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        loop.main(["--out", str(tmp_path), *LOOP, option, value])
    assert end.value.code == 2


def test_a_plan_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "loop", "--out", tmp_path, *LOOP, "--steps", 0)
    assert "at least 1 step, got 0" in said
    said = refused(capsys, "loop", "--out", tmp_path, *LOOP, "--tokens-per-batch", 8191)
    assert "at least 8192 tokens per batch" in said


def test_missing_and_broken_files_are_named(
    config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    missing = tmp_path / "none" / "config.json"
    for option, command in (("--start-from", "loop"), ("--checkpoint", "drafter")):
        assert str(missing) in refused(capsys, command, *out, option, missing.parent, *LOOP)
    broken = tmp_path / "run"
    broken.mkdir()
    for content in (b"", b"not an archive", b"PK\x03\x04 cut short"):
        (broken / "state.pt").write_bytes(content)
        assert str(broken / "state.pt") in refused(capsys, "loop", "--out", broken, *LOOP)
    save_weights(Parameters(config, initial_weights(config, 0), "cpu"), 1, broken)
    part = broken / "weights1.pt"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    assert str(part) in refused(capsys, "export", "--weights", broken, *out)
    torch.save({"step": 2, "leaves": {}}, part)
    assert f"{part} is of another step" in refused(capsys, "export", "--weights", broken, *out)
    part.unlink()
    with pytest.raises(ValueError, match=r"expected weights1\.pt"):
        load_weights_parts(broken)
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_only_with_its_own_plan(
    config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = base_plan(8, 32768)
    trainer = Trainer(config, plan, initial_weights(config, 0), "cpu")
    train(trainer, (), tmp_path, minutes=1)
    out = ("--out", tmp_path, *LOOP)
    said = refused(capsys, "loop", *out, "--steps", 9)
    assert "of a run with steps 8, got steps 9" in said
    said = refused(capsys, "loop", *out, "--tokens-per-batch", 16384)
    assert "tokens_per_batch 32768, got tokens_per_batch 16384" in said
    assert "seed 0, got" in refused(capsys, "loop", *out, "--plan", "long")
    # The same plan, but the narrow model is not what the command trains.
    said = refused(capsys, "loop", *out)
    assert str(tmp_path / "state.pt") in said
    assert "of another model" in said
