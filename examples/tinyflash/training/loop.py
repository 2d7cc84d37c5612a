"""The training loop of the backbone: resumable, in pieces of a given number of minutes.

    python -m examples.tinyflash.training.loop --out runs/tinyflash --steps 3000 --minutes 9

Run it again to continue, also after Ctrl-C; it stops by itself after `--steps`. The last part of
the steps trains the network as the released layout stores it (weights rounded, inputs of quantised
linears rounded) while the learning rate falls to zero. Beside the whole state, each piece writes
the weights alone in bfloat16, a few files small enough to carry; `export` makes a checkpoint of
them, from which `--plan long --start-from` begins a second run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.network.engram import EngramHash
from engine.network.rope import RopeTables
from engine.network.weights import NetworkWeights
from examples.tinyflash.training.batch import HostBatch, TrainingBatch, training_batch
from examples.tinyflash.training.captured import CapturedSteps
from examples.tinyflash.training.forward import BackboneForward
from examples.tinyflash.training.initial import (
    checkpoint_config,
    checkpoint_weights,
    initial_weights,
    model_config,
)
from examples.tinyflash.training.monitor import probes, share_right
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.pieces import (
    PiecewiseTrainer,
    exit_code,
    piece_parser,
    run_piece,
    saved_state,
)
from examples.tinyflash.training.plan import PLANS, Phase, Plan
from plugins.linear import linear

_ROUNDING_REFRESH_STEPS = 8
_BIAS_STEP = 1e-3


class Trainer(PiecewiseTrainer):
    def __init__(
        self, config: ModelConfig, plan: Plan, weights: NetworkWeights, device: str
    ) -> None:
        parameters = Parameters(config, weights, device)
        leaves = parameters.leaves
        trained = {p: t for p, t in leaves.items() if not _frozen(p)}
        super().__init__(config, plan, parameters, trained, device)
        self.rope = RopeTables.build(config, torch.device(device))
        self.engram = EngramHash(config, weights.token_class)
        self._biases = [leaves[f"layers.{i}.moe.bias"] for i in range(config.num_hidden_layers)]
        self._captured = CapturedSteps(self.optimizer.clear) if device != "cpu" else None
        self._phase: Phase | None = None

    def train_step(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """Losses and the gradient's norm."""
        plan, step = self.plan, self.step
        data = batch.to(self.device)
        quantized = plan.quantized(step)
        if self._captured is None:
            self._prepare(step)
            values = self._learn(data, quantized=quantized)
        else:
            if plan.phase(step) != self._phase:
                self._captured.forget()
                self._phase = plan.phase(step)
            with torch.cuda.stream(self._captured.stream):
                self._prepare(step)
            variant = (len(data.ragged.decoder_rows), quantized)
            learn = partial(self._learn, quantized=quantized)
            values = self._captured.run(variant, learn, data)
        self.step += 1
        return values

    def _prepare(self, step: int) -> None:
        self.optimizer.set_share(self.plan.learning_rate(step))
        due = step % _ROUNDING_REFRESH_STEPS == 0 or not self.parameters.rounding
        if self.plan.quantized(step) and due:
            self.parameters.refresh_rounding()

    def _learn(self, data: TrainingBatch, *, quantized: bool) -> dict[str, torch.Tensor]:
        losses = self.losses(data, quantized=quantized)
        (losses["answer"] + losses["indexer"]).backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.step()
        self.optimizer.clear()
        return {**{k: v.detach() for k, v in losses.items()}, "grad_norm": norm}

    def losses(self, data: TrainingBatch, *, quantized: bool) -> dict[str, torch.Tensor]:
        logits, forward = self._run(data, quantized=quantized)
        self._balance(forward.collected.expert_counts)
        each = torch.nn.functional.cross_entropy(logits, data.targets, reduction="none")
        right = (logits.argmax(-1) == data.targets) * (data.weights > 0)
        return {
            "answer": (each * data.weights).sum() / data.weights.sum(),
            "indexer": torch.stack(forward.collected.indexer_losses).mean(),
            "accuracy": right.sum() / (data.weights > 0).sum(),
        }

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Share of right conversations of every probe as when serving: decoder trimmed, cold and
        after a prefix hit."""
        quantized = self.plan.quantized(self.step) and bool(self.parameters.rounding)
        result = {}
        for probe in probes():
            for replayed, suffix in ((0.0, ""), (1.0, " hit")):
                batch = training_batch(
                    probe.batch, self.config, self.engram, 0, trimmed=True, replayed=replayed
                )
                data = batch.to(self.device)
                logits, _ = self._run(data, quantized=quantized)
                right = logits.argmax(-1) == data.targets
                result[probe.name + suffix] = share_right(right, probe.batch)
        return result

    def _run(self, data: TrainingBatch, *, quantized: bool) -> tuple[torch.Tensor, BackboneForward]:
        topk = self.plan.phase(self.step).index_topk or self.config.index_topk
        forward = BackboneForward(
            dataclasses.replace(self.config, index_topk=topk),
            self.parameters.weights(quantized=quantized),
            self.rope,
            data,
        )
        hidden = forward.run().index_select(0, data.loss_rows)
        return linear(hidden, forward.weights.head), forward

    @torch.no_grad()
    def _balance(self, counts: dict[int, torch.Tensor]) -> None:
        """Move each router's selection bias towards experts below the mean load."""
        load = torch.stack([counts[layer] for layer in range(len(self._biases))]).float()
        moves = _BIAS_STEP * torch.sign(load.mean(1, keepdim=True) - load)
        torch._foreach_add_(self._biases, list(moves.unbind(0)))


def _frozen(path: str) -> bool:
    """Router biases follow the load, not the gradient; the drafter is trained afterwards."""
    return path.endswith(("moe.bias", "moe.bias_image")) or path.startswith("draft.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("loop", __doc__)
    parser.add_argument("--plan", choices=sorted(PLANS), default="base")
    parser.add_argument("--start-from", type=Path, help="checkpoint to begin with")
    options = parser.parse_args(argv)
    return exit_code("loop", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    plan = PLANS[options.plan](options.steps, options.tokens_per_batch)
    state = saved_state(options.out, plan)
    torch.set_float32_matmul_precision("high")
    if options.device != "cpu":
        from examples.tinyflash.training.compiled import install

        install()
    if options.start_from is None:
        config = model_config()
        weights = initial_weights(config, 0)
    else:
        config = checkpoint_config(options.start_from)
        weights = checkpoint_weights(config, options.start_from)
    engram = EngramHash(config, weights.token_class)
    run_piece(
        options, plan, state, config, engram,
        lambda: Trainer(config, plan, weights, options.device), Trainer.held_out,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
