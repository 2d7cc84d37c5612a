"""Training of the DSpark stages on the frozen backbone, resumable in pieces as `loop` is.

    python -m examples.tinyflash.training.drafter --checkpoint checkpoint --out runs/drafter \\
        --steps 1500 --minutes 5

The backbone runs as released, without gradients. Anchors are drawn among the tokens that the model
writes; the stages see the target's features below the anchor and propose the block after it, the
Markov chain fed with the true tokens. The confidence learns whether the first choice is right,
given that all before it were. (Technical report, section on DSpark: trained with the backbone
frozen.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from engine.batch import DraftBatch
from engine.config import ModelConfig
from engine.network.draft import Draft
from engine.network.engram import EngramHash
from engine.network.rope import RopeTables
from engine.network.weights import NetworkWeights
from examples.tinyflash.mixture import Batch
from examples.tinyflash.training.batch import HostBatch, TrainingBatch, training_batch
from examples.tinyflash.training.forward import BackboneForward
from examples.tinyflash.training.initial import checkpoint_config, checkpoint_weights
from examples.tinyflash.training.monitor import probes
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.pieces import (
    PiecewiseTrainer,
    State,
    exit_code,
    piece_parser,
    run_piece,
    saved_state,
)
from examples.tinyflash.training.plan import Phase, Plan
from plugins.linear import linear
from plugins.norm import rms_norm

_ROUNDING_REFRESH_STEPS = 8
_ANCHORS = 4096
_CONFIDENCE_WEIGHT = 0.1


class Blocks(NamedTuple):
    """Anchors and the tokens that follow them, B per anchor."""

    batch: DraftBatch
    tokens: torch.Tensor  # [A, B + 1] the anchor, then the block's true tokens
    written: torch.Tensor  # [A, B] the model writes this token


class DraftLogits(NamedTuple):
    logits: torch.Tensor  # [A, B, vocab]
    confidence: torch.Tensor  # [A, B] before the sigmoid


class DrafterTrainer(PiecewiseTrainer):
    def __init__(self, config: ModelConfig, parameters: Parameters, plan: Plan, device: str):
        trained = {
            path: leaf
            for path, leaf in parameters.leaves.items()
            if path.startswith("draft.") and not path.endswith((".bias", ".bias_image"))
        }
        for path, leaf in parameters.leaves.items():
            leaf.requires_grad_(path in trained)
        super().__init__(config, plan, parameters, trained, device)
        self._rope = RopeTables.build(config, torch.device(device))
        self.engram = EngramHash(config, parameters.weights(quantized=False).token_class.cpu())
        self._generator = torch.Generator(device).manual_seed(0)

    def state(self) -> State:
        return super().state() | {"generator": self._generator.get_state()}

    def restore(self, state: State) -> None:
        super().restore(state)
        self._generator.set_state(state["generator"])

    def train_step(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        if self.step % _ROUNDING_REFRESH_STEPS == 0:
            self.parameters.refresh_rounding()
        blocks, out = self._propose(batch)
        right = out.logits.argmax(-1) == blocks.tokens[:, 1:]
        chain = blocks.written & _all_before(right)
        losses = {
            "draft": torch.nn.functional.cross_entropy(
                out.logits[blocks.written], blocks.tokens[:, 1:][blocks.written]
            ),
            "confidence": torch.nn.functional.binary_cross_entropy_with_logits(
                out.confidence[chain], right[chain].float()
            ),
        }
        loss = losses["draft"] + _CONFIDENCE_WEIGHT * losses["confidence"]
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.set_share(self.plan.learning_rate(self.step))
        self.optimizer.step()
        self.optimizer.clear()
        self.step += 1
        accepted = (right & chain).sum(1).float().mean()
        return {**{name: one.detach() for name, one in losses.items()}, "accepted": accepted}

    @torch.no_grad()
    def accepted_by_position(self, batch: Batch) -> list[float]:
        """Share of anchors whose first k drafts are all right, k = 1 … B, where B tokens follow."""
        self.parameters.refresh_rounding()
        host = training_batch(batch, self.config, self.engram, self.step, trimmed=True)
        blocks, out = self._propose(host)
        right = out.logits.argmax(-1) == blocks.tokens[:, 1:]
        whole = blocks.written.all(1)
        prefix = right[whole].int().cumprod(1).float()
        return [float(share) for share in prefix.mean(0)]

    def _propose(self, batch: HostBatch) -> tuple[Blocks, DraftLogits]:
        data = batch.to(self.device)
        weights = self.parameters.weights(quantized=True)
        assert weights.draft is not None, "TinyFlash drafts"
        with torch.no_grad():
            forward = BackboneForward(self.config, weights, self._rope, data, draft_features=True)
            forward.run()
            features = torch.cat(forward.collected.draft_features, dim=-1)
        draft = Draft(self.config, weights, weights.draft, self._rope)
        rows = data.ragged.decoder_rows
        request, positions = data.ragged.request[rows], data.ragged.positions[rows]
        draft.store_context(features, request, positions, forward.cache)
        blocks = self._blocks(data)
        return blocks, self._logits(weights, draft.hidden(blocks.batch, forward.cache), blocks)

    def _blocks(self, data: TrainingBatch) -> Blocks:
        """Random written tokens as anchors, the last of a conversation excepted."""
        ragged, size = data.ragged, self.config.dspark_block_size
        written = torch.zeros(ragged.num_rows + size + 1, dtype=torch.bool, device=self.device)
        written[ragged.decoder_rows[data.loss_rows[data.weights > 0]] + 1] = True
        anchors = torch.nonzero(written[:-1] & written[1:]).squeeze(1)
        picked = torch.randperm(len(anchors), device=self.device, generator=self._generator)
        picked = picked[:_ANCHORS]
        anchors = anchors[picked].sort().values
        behind = anchors.unsqueeze(1) + torch.arange(size + 1, device=self.device)
        request = ragged.request[anchors]
        inside = behind[:, 1:] < ragged.query_start[request + 1].unsqueeze(1)
        tokens = ragged.tokens[behind.clamp(max=ragged.num_rows - 1)]
        # A block ends where the model stops writing: what follows is the next question.
        follows = (written[behind[:, 1:]] & inside).int().cumprod(1).bool()
        batch = DraftBatch(
            anchors=tokens[:, 0],
            positions=ragged.positions[anchors],
            request=request,
            floor=ragged.decoder_floor[request],
        )
        return Blocks(batch, tokens, follows)

    def _logits(self, weights: NetworkWeights, hidden: torch.Tensor, blocks: Blocks) -> DraftLogits:
        draft, size = weights.draft, self.config.dspark_block_size
        assert draft is not None, "TinyFlash drafts"
        base = linear(rms_norm(hidden, draft.norm, self.config.rms_norm_eps), weights.head)
        markov = draft.markov_embed[blocks.tokens[:, :size]]
        logits = torch.unflatten(base, 0, (-1, size)) + linear(
            markov.flatten(0, 1), draft.markov_head
        ).view(*markov.shape[:2], -1)
        both = torch.cat([hidden, markov.flatten(0, 1)], dim=-1)
        return DraftLogits(logits, linear(both, draft.confidence).view(-1, size))


def _all_before(right: torch.Tensor) -> torch.Tensor:
    """[A, B] whether all earlier drafts of the block are right."""
    before = torch.nn.functional.pad(right[:, :-1].int(), (1, 0), value=1)
    return before.cumprod(1).bool()


def main(argv: Sequence[str] | None = None) -> int:
    parser = piece_parser("drafter", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the trained backbone")
    options = parser.parse_args(argv)
    return exit_code("drafter", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    # All lengths from the start, and seeds that the backbone did not see.
    plan = Plan(
        options.steps,
        options.tokens_per_batch,
        (Phase(0.5, 2048, "short"), Phase(1.0, 8192, "long")),
        quantized_from=0.0,
        decay_from=0.3,
        seed=1,
    )
    state = saved_state(options.out, plan)
    torch.set_float32_matmul_precision("high")
    if options.device != "cpu":
        from examples.tinyflash.training.compiled import install

        install()
    config = checkpoint_config(options.checkpoint)
    weights = checkpoint_weights(config, options.checkpoint)
    engram = EngramHash(config, weights.token_class)

    def make() -> DrafterTrainer:
        return DrafterTrainer(
            config, Parameters(config, weights, options.device), plan, options.device
        )

    trainer = run_piece(options, plan, state, config, engram, make)
    for probe in probes()[:4]:
        shares = trainer.accepted_by_position(probe.batch)
        print(f"{probe.name}: {[round(s, 3) for s in shares]}, together {sum(shares):.2f}")


if __name__ == "__main__":
    sys.exit(main())
