"""The training loop of the backbone: resumable, in pieces of a given number of minutes.

    python -m examples.tinyflash.training.loop --out runs/tinyflash --steps 3000 --minutes 9

Run it again to continue; it stops by itself after `--steps`. The last part of the steps trains the
network as the released layout stores it (weights rounded, inputs of quantised linears rounded)
while the learning rate falls to zero. Beside the whole state, each piece writes the weights alone
in bfloat16, a few files small enough to carry; `export` makes a checkpoint of them, from which
`--plan long --start-from` begins a second run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterable
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
from examples.tinyflash.training.optimizer import Optimizer
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.plan import PLANS, Batches, Phase, Plan
from plugins.linear import linear

_ROUNDING_REFRESH_STEPS = 8
_BIAS_STEP = 1e-3
_REPORT_STEPS = 50
_WEIGHT_PARTS = 3


class Trainer:
    def __init__(
        self, config: ModelConfig, plan: Plan, weights: NetworkWeights, device: str
    ) -> None:
        self.config = config
        self.plan = plan
        self.device = device
        self.parameters = Parameters(config, weights, device)
        self.rope = RopeTables.build(config, torch.device(device))
        self.engram = EngramHash(config, weights.token_class)
        leaves = self.parameters.leaves
        self.trained = {p: t for p, t in leaves.items() if not _frozen(p)}
        self._biases = [leaves[f"layers.{i}.moe.bias"] for i in range(config.num_hidden_layers)]
        self.optimizer = Optimizer(self.trained, plan.matrix_lr, plan.adam_lr)
        self._captured = CapturedSteps(self.optimizer.clear) if device != "cpu" else None
        self._phase: Phase | None = None
        self.step = 0
        self.history: list[dict[str, float]] = []

    def train_step(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """Losses and the gradient's norm; on a device valid until the next step."""
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

    def wait(self) -> None:
        """Until the device has done all steps."""
        if self._captured is not None:
            torch.cuda.synchronize()

    def state(self) -> dict[str, object]:
        self.wait()
        return {
            "step": self.step,
            "leaves": {p: t.detach() for p, t in self.parameters.leaves.items()},
            "rounding": self.parameters.rounding,
            "optimizer": self.optimizer.state(),
            "history": self.history,
        }

    def restore(self, state: dict[str, object]) -> None:
        self.parameters.restore(state["leaves"])  # type: ignore[arg-type]
        self.optimizer.restore(state["optimizer"])  # type: ignore[arg-type]
        self.step = int(state["step"])  # type: ignore[call-overload]
        self.history = list(state["history"])  # type: ignore[call-overload]
        rounding: dict[str, torch.Tensor] = state["rounding"]  # type: ignore[assignment]
        self.parameters.rounding = {p: t.to(self.device) for p, t in rounding.items()}


def _frozen(path: str) -> bool:
    """Router biases follow the load, not the gradient; the drafter is trained afterwards."""
    return path.endswith(("moe.bias", "moe.bias_image")) or path.startswith("draft.")


def train(
    trainer: Trainer,
    batches: Iterable[HostBatch],
    out: Path,
    *,
    minutes: float,
    probe_steps: int = 500,
) -> None:
    """Train until the batches' end or for `minutes`, then write the state.

    Every `probe_steps` steps and at the end the held-out accuracies are printed; never for 0.
    """
    deadline = time.monotonic() + 60 * minutes
    plan = trainer.plan
    last_time, last_step = time.monotonic(), trainer.step
    for batch in batches:
        values = trainer.train_step(batch)
        if trainer.step % _REPORT_STEPS == 0 or trainer.step == plan.steps:
            trainer.wait()
            record = {k: float(v) for k, v in values.items()}
            now = time.monotonic()
            rate = plan.tokens_per_batch * (trainer.step - last_step) / (now - last_time)
            last_time, last_step = now, trainer.step
            trainer.history.append({"step": trainer.step, **record})
            print(
                f"step {trainer.step}/{plan.steps}  "
                + "  ".join(f"{k} {v:.4f}" for k, v in record.items())
                + f"  {rate / 1e3:.0f}K tokens/s",
                flush=True,
            )
            if not math.isfinite(record["answer"]):
                raise FloatingPointError(f"the loss is {record['answer']} at step {trainer.step}")
        if probe_steps and (trainer.step % probe_steps == 0 or trainer.step == plan.steps):
            _probe(trainer)
        if time.monotonic() > deadline:
            break
    save(trainer, out)


def _probe(trainer: Trainer) -> None:
    trainer.wait()
    shares = trainer.held_out()
    trainer.history.append({"step": trainer.step, **shares})
    print("  ".join(f"{name} {share:.2f}" for name, share in shares.items()), flush=True)


def save(trainer: Trainer, out: Path) -> None:
    """The whole state, and the weights alone in parts; replaced only when complete."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), out / "state.tmp")
    (out / "state.tmp").rename(out / "state.pt")
    (out / "history.json").write_text(json.dumps(trainer.history))
    save_weights(trainer.parameters, trainer.step, out)


def save_weights(parameters: Parameters, step: int, out: Path) -> None:
    """The weights alone in bfloat16, in parts."""
    leaves = parameters.leaves
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(_WEIGHT_PARTS)]
    for path in sorted(leaves, key=lambda path: -leaves[path].numel()):
        smallest = min(parts, key=lambda part: sum(t.numel() for t in part.values()))
        smallest[path] = leaves[path].detach().bfloat16().cpu()
    for number, part in enumerate(parts):
        torch.save({"step": step, "leaves": part}, out / f"weights{number}.pt")


def load_weights_parts(directory: Path) -> dict[str, torch.Tensor]:
    """What `save_weights` wrote. Raises ValueError where it wrote nothing."""
    leaves: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("weights*.pt")):
        leaves |= torch.load(file, map_location="cpu")["leaves"]
    if not leaves:
        raise ValueError(f"expected weights0.pt … of a training run in {directory}, found none")
    return leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--plan", choices=sorted(PLANS), default="base")
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start-from", type=Path, help="checkpoint to begin with")
    options = parser.parse_args()
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
    plan = PLANS[options.plan](options.steps, options.tokens_per_batch)
    saved = options.out / "state.pt"
    state = torch.load(saved, map_location="cpu") if saved.exists() else None
    first = 0 if state is None else state["step"]
    engram = EngramHash(config, weights.token_class)
    batches = Batches(plan, first, options.workers, config, engram)
    trainer = Trainer(config, plan, weights, options.device)
    if state is not None:
        trainer.restore(state)
        print(f"resumed at step {trainer.step}", flush=True)
    train(trainer, batches, options.out, minutes=options.minutes)


if __name__ == "__main__":
    main()
