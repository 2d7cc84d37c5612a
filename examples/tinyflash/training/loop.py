"""The training loop of the backbone: resumable, in pieces of a given number of minutes.

    python -m examples.tinyflash.training.loop --out runs/tinyflash --steps 3000 --minutes 9

Run it again to continue; it stops by itself after `--steps`. The last quarter of the steps trains
the network as the released layout stores it (weights rounded, inputs of quantised linears rounded)
while the learning rate falls to zero.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.network.engram import EngramHash
from engine.network.rope import RopeTables
from examples.tinyflash.mixture import Batch, make_batch
from examples.tinyflash.training.batch import TrainingBatch, training_batch
from examples.tinyflash.training.forward import BackboneForward
from examples.tinyflash.training.initial import initial_weights, model_config
from examples.tinyflash.training.parameters import Parameters
from plugins.linear import linear

_ROUNDING_REFRESH_STEPS = 8
_BIAS_STEP = 1e-3


@dataclass(frozen=True)
class Plan:
    """A whole training run. Everything that a resumed piece must agree on."""

    steps: int
    tokens_per_batch: int
    long_from: float = 0.35  # share of the steps after which documents reach their full length
    quantized_from: float = 0.7  # share of the steps after which weights are rounded
    decay_from: float = 0.6
    peak_lr: float = 2e-3
    warmup_steps: int = 150
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        start = self.decay_from * self.steps
        cool = 1.0 if step < start else max(0.0, (self.steps - step) / (self.steps - start))
        return self.peak_lr * warm * cool

    def data(self, step: int) -> tuple[int, str]:
        """Longest conversation and mixture of a step: short ones first, then up to 8K tokens."""
        share = step / self.steps
        if share < self.long_from * 0.5:
            return 512, "short"
        if share < self.long_from:
            return 2048, "short"
        return 8192, "long"

    def quantized(self, step: int) -> bool:
        return step >= self.quantized_from * self.steps


def _draw(plan: Plan, step: int) -> Batch:
    seq_len, stage = plan.data(step)
    return make_batch(plan.seed, step, plan.tokens_per_batch, seq_len, stage)  # type: ignore[arg-type]


class Trainer:
    def __init__(self, config: ModelConfig, plan: Plan, device: str) -> None:
        self.config = config
        self.plan = plan
        self.device = device
        weights = initial_weights(config, plan.seed)
        self.parameters = Parameters(config, weights, device)
        self.rope = RopeTables.build(config, torch.device(device))
        self.engram = EngramHash(config, weights.token_class.to(device))
        leaves = self.parameters.leaves
        self.trained = {p: t for p, t in leaves.items() if not _frozen(p)}
        matrices = [t for p, t in self.trained.items() if t.dim() > 1 and "hc" not in p]
        vectors = [t for p, t in self.trained.items() if not (t.dim() > 1 and "hc" not in p)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.05},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=plan.peak_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=device != "cpu",
        )
        self.step = 0
        self.history: list[dict[str, float]] = []

    def train_step(self, batch: Batch) -> dict[str, torch.Tensor]:
        quantized = self.plan.quantized(self.step)
        if quantized and self.step % _ROUNDING_REFRESH_STEPS == 0:
            self.parameters.refresh_rounding()
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate(self.step)
        trimmed = self.step % 2 == 1
        data = training_batch(batch, self.config, self.device, trimmed=trimmed)
        losses = self.losses(data, quantized=quantized)
        (losses["answer"] + 0.1 * losses["indexer"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.trained.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {**{k: v.detach() for k, v in losses.items()}, "grad_norm": norm}

    def losses(self, data: TrainingBatch, *, quantized: bool) -> dict[str, torch.Tensor]:
        weights = self.parameters.weights(quantized=quantized)
        forward = BackboneForward(
            self.config, weights, self.rope, self.engram, data.ragged, data.query_start, 512
        )
        hidden = forward.run()[data.loss_rows]
        logits = linear(hidden, weights.head)
        answer = torch.nn.functional.cross_entropy(logits, data.targets)
        self._balance(forward.collected.expert_counts)
        right = (logits.argmax(-1) == data.targets).float().mean()
        return {
            "answer": answer,
            "indexer": torch.stack(forward.collected.indexer_losses).mean(),
            "accuracy": right,
        }

    @torch.no_grad()
    def _balance(self, counts: dict[int, torch.Tensor]) -> None:
        """Move each router's selection bias towards experts below the mean load."""
        for layer, count in counts.items():
            load = count.float()
            bias = self.parameters.leaves[f"layers.{layer}.moe.bias"]
            bias += _BIAS_STEP * torch.sign(load.mean() - load)

    def state(self) -> dict[str, object]:
        return {
            "step": self.step,
            "leaves": {p: t.detach() for p, t in self.parameters.leaves.items()},
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
        }

    def restore(self, state: dict[str, object]) -> None:
        with torch.no_grad():
            for path, value in state["leaves"].items():  # type: ignore[attr-defined]
                self.parameters.leaves[path].copy_(value)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        self.step = int(state["step"])  # type: ignore[call-overload]
        self.history = list(state["history"])  # type: ignore[call-overload]
        if self.plan.quantized(self.step):
            self.parameters.refresh_rounding()


def _frozen(path: str) -> bool:
    """Router biases follow the load, not the gradient; the drafter is trained afterwards."""
    return path.endswith(("moe.bias", "moe.bias_image")) or path.startswith("draft.")


def batches(plan: Plan, first: int, workers: int) -> Iterator[Batch]:
    """The batches of steps `first` … in order, made by worker processes ahead of time."""
    if not workers:
        yield from map(partial(_draw, plan), range(first, plan.steps))
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(partial(_draw, plan), range(first, plan.steps))


def train(trainer: Trainer, out: Path, *, minutes: float, workers: int) -> None:
    """Train until the plan's end or for `minutes`, then write the state."""
    deadline = time.monotonic() + 60 * minutes
    plan = trainer.plan
    started, first = time.monotonic(), trainer.step
    for batch in batches(plan, trainer.step, workers):
        values = trainer.train_step(batch)
        if trainer.step % 20 == 0 or trainer.step == plan.steps:
            rate = plan.tokens_per_batch * (trainer.step - first) / (time.monotonic() - started)
            record = {k: float(v) for k, v in values.items()}
            trainer.history.append({"step": trainer.step, **record})
            print(
                f"step {trainer.step}/{plan.steps}  "
                + "  ".join(f"{k} {v:.4f}" for k, v in record.items())
                + f"  {rate / 1e3:.0f}K tokens/s",
                flush=True,
            )
            if not math.isfinite(record["answer"]):
                raise FloatingPointError(f"the loss is {record['answer']} at step {trainer.step}")
        if time.monotonic() > deadline:
            break
    out.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), out / "state.tmp")
    (out / "state.tmp").rename(out / "state.pt")
    (out / "history.json").write_text(json.dumps(trainer.history))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tokens-per-batch", type=int, default=65536)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="fuse elementwise operators")
    parser.add_argument("--start-from", type=Path, help="weights of an earlier state.pt")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.compile:
        from examples.tinyflash.training.compiled import compile_operators

        compile_operators()
    config = model_config()
    trainer = Trainer(config, Plan(options.steps, options.tokens_per_batch), options.device)
    state = options.out / "state.pt"
    if state.exists():
        trainer.restore(torch.load(state, map_location=options.device))
        print(f"resumed at step {trainer.step}", flush=True)
    train(trainer, options.out, minutes=options.minutes, workers=options.workers)


if __name__ == "__main__":
    main()
