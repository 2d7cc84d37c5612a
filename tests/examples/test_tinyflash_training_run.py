"""A reduced training run on a CPU: it learns, resumes exactly, and exports what it trained."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.layout import all_weights
from builder.progress import Progress
from engine.config import ModelConfig
from engine.tensor_source import SafetensorsSource
from examples.tinyflash.mixture import Batch, make_batch
from examples.tinyflash.training.batch import training_batch
from examples.tinyflash.training.drafter import DrafterTrainer
from examples.tinyflash.training.export import export
from examples.tinyflash.training.initial import (
    checkpoint_config,
    checkpoint_weights,
    initial_weights,
)
from examples.tinyflash.training.loop import Trainer
from examples.tinyflash.training.monitor import probes, share_right
from examples.tinyflash.training.optimizer import orthogonalised
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.pieces import (
    load_weights_parts,
    save,
    train,
)
from examples.tinyflash.training.plan import Batches, Phase, Plan
from plugins.formats.released import dequantize_fp4_rows, dequantize_fp8_blocks

PLAN = Plan(
    steps=12, tokens_per_batch=512, phases=(Phase(1.0, 512, "short"),),
    quantized_from=0.5, decay_from=0.5, warmup_steps=2,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(0, 0, PLAN.tokens_per_batch, 512, "short")


def trainer_of(config: ModelConfig, plan: Plan = PLAN) -> Trainer:
    return Trainer(config, plan, initial_weights(config, 0), "cpu")


def run(trainer: Trainer, out: Path, minutes: float) -> None:
    batches = Batches(trainer.plan, trainer.step, 0, trainer.config, trainer.engram)
    train(trainer, batches, out, minutes=minutes)


def test_a_run_in_two_pieces_equals_one_run_and_learns(config: ModelConfig, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=4, quantized_from=0.3)
    whole = trainer_of(config, plan)
    run(whole, tmp_path / "whole", 10)
    first = trainer_of(config, plan)
    for _ in range(3):
        run(first, tmp_path / "parts", 0)
    assert first.step == 3
    second = trainer_of(config, plan)
    second.restore(torch.load(tmp_path / "parts" / "state.pt"))
    run(second, tmp_path / "parts", 10)
    assert second.step == whole.step == 4
    for path, leaf in whole.parameters.leaves.items():
        assert torch.equal(leaf, second.parameters.leaves[path]), path
    parts = load_weights_parts(tmp_path / "whole")
    assert parts.keys() == whole.parameters.leaves.keys()


def test_the_loss_of_one_batch_falls_far_below_chance(config: ModelConfig, batch: Batch) -> None:
    trainer = trainer_of(config)
    host = training_batch(batch, config, trainer.engram, 0, trimmed=True)
    losses = [float(trainer.train_step(host)["answer"]) for _ in range(8)]
    assert losses[0] > np.log(config.vocab_size) - 1.0
    assert losses[-1] < 0.5 * losses[0]


def test_every_weight_has_exactly_one_released_name(config: ModelConfig) -> None:
    parameters = Parameters(config, initial_weights(config, 0), "cpu")
    named = list(parameters.named_released())
    expected = {spec.name: spec.shape for spec in all_weights(config)}
    assert len(named) == len(expected)
    assert {name: tuple(value.shape) for name, value in named} == expected


def test_the_exported_checkpoint_holds_the_rounded_weights(
    config: ModelConfig, tmp_path: Path
) -> None:
    parameters = Parameters(config, initial_weights(config, 4), "cpu")
    parameters.refresh_rounding()
    export(config, parameters, tmp_path / "checkpoint", Progress())
    source = SafetensorsSource(tmp_path / "checkpoint")
    rounded = parameters.weights(quantized=True).layers[3]
    fp8 = dequantize_fp8_blocks(
        source.read("layers.3.attn.wq_a.weight"), source.read("layers.3.attn.wq_a.scale"),
        torch.float32,
    )  # fmt: skip
    assert torch.equal(fp8, rounded.attention.wq_a.value)
    fp4 = dequantize_fp4_rows(
        source.read("layers.3.ffn.experts.2.w1.weight"),
        source.read("layers.3.ffn.experts.2.w1.scale"),
        torch.float32,
    )
    assert torch.equal(fp4, rounded.moe.routed.w1[2])
    assert checkpoint_config(tmp_path / "checkpoint") == config
    again = Parameters(config, checkpoint_weights(config, tmp_path / "checkpoint"), "cpu")
    with torch.no_grad():
        stored = dict(again.named_released())
    wanted = Parameters(config, parameters.weights(quantized=True), "cpu").named_released()
    for name, value in wanted:
        assert torch.allclose(stored[name], value, atol=0, rtol=1e-6), name


def test_the_drafter_learns_and_leaves_the_backbone_alone(
    config: ModelConfig, batch: Batch
) -> None:
    parameters = Parameters(config, initial_weights(config, 0), "cpu")
    before = {path: leaf.detach().clone() for path, leaf in parameters.leaves.items()}
    drafter = DrafterTrainer(config, parameters, PLAN, "cpu")
    host = training_batch(batch, config, drafter.engram, 0, trimmed=True)
    losses = [float(drafter.train_step(host)["draft"]) for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0]
    moved = {p for p, leaf in parameters.leaves.items() if not torch.equal(leaf, before[p])}
    assert moved
    assert all(path.startswith("draft.") for path in moved)
    shares = drafter.accepted_by_position(batch)
    assert len(shares) == config.dspark_block_size
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in pairwise(shares))


def test_orthogonalised_has_unit_singular_values() -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(2, 24, 8, generator=generator)
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_conversation_counts_as_right_when_every_written_token_is() -> None:
    """Three conversations of 2, 1 and 3 written tokens; one token of the last is wrong."""
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=np.bool_)
    starts = np.array([0, 3, 5, 9], dtype=np.int32)
    batch = Batch(np.zeros(9, np.int32), mask, starts, ("talk",) * 3)
    right = torch.tensor([True, True, True, True, False, True])
    assert share_right(right, batch) == pytest.approx(2 / 3)


def test_probes_hold_questions_of_every_kind() -> None:
    names = [probe.name for probe in probes()]
    assert names == [
        "arithmetic train", "arithmetic numbers", "arithmetic range", "arithmetic template",
        "retrieval 512", "retrieval 2K", "retrieval 8K",
    ]  # fmt: skip
    longest = max(int(np.diff(probe.batch.query_start).max()) for probe in probes())
    assert 7500 < longest <= 8192


def test_a_run_that_saved_nothing_has_no_weights(tmp_path: Path) -> None:
    """Exported, they would be the random ones that training begins with."""
    with pytest.raises(ValueError, match=r"expected weights0\.pt"):
        load_weights_parts(tmp_path / "mistyped")


def test_saving_replaces_the_whole_state(config: ModelConfig, tmp_path: Path) -> None:
    trainer = trainer_of(config)
    save(trainer, tmp_path)
    save(trainer, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "history.json", "state.pt", "weights0.pt", "weights1.pt", "weights2.pt",
    ]  # fmt: skip
