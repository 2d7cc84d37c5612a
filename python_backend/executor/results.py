"""Where graphs leave their results: memory of its own, because what a graph computes in is shared
with all others, and a graph that reads another's result must find it in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engine.network import Network
from engine.network.block import Residual
from engine.network.decoder import DecoderOutput
from engine.network.draft import DraftOutput
from python_backend.executor.shapes import GraphSizes

Output = TypeVar("Output", DecoderOutput, Residual, DraftOutput)


@dataclass(frozen=True)
class Results:
    """Memory for the largest size of each kind. A result lives until the next of its kind."""

    logits: torch.Tensor  # [most logit rows, vocab]
    features: torch.Tensor  # [most rows, targets·D]
    encoded: Residual  # [most encoder rows, …]
    decoder_input: Residual  # [most decoder rows, …]

    @staticmethod
    def of(network: Network, sizes: GraphSizes, device: str) -> Results:
        config, dtype = network.config, network.dtype
        wide = torch.promote_types(dtype, torch.float32)
        decode_rows = sizes.requests[-1] * sizes.verify_rows
        features = len(config.dspark_target_layer_ids) * config.hidden_size

        def residual(rows: int) -> Residual:
            shape = (rows, config.hc_mult)
            return Residual(
                torch.zeros(*shape, config.hidden_size, dtype=dtype, device=device),
                torch.zeros(shape, dtype=wide, device=device),
            )

        rows = max(decode_rows, sizes.decoder_rows[-1])
        return Results(
            logits=torch.zeros(decode_rows, config.vocab_size, dtype=wide, device=device),
            features=torch.zeros(rows, features, dtype=dtype, device=device),
            encoded=residual(sizes.encoder_rows[-1]),
            decoder_input=residual(sizes.decoder_rows[-1]),
        )

    def keep(self, output: Output) -> Output:
        """The output in its place. What was drafted stays where it is, being little."""
        kept: Any = output
        if isinstance(output, DecoderOutput):
            kept = DecoderOutput(
                _copied(output.logits, self.logits),
                _copied(output.draft_features, self.features),
            )
        elif isinstance(output, Residual):
            kept = _copied_residual(output, self.encoded)
        made: Output = kept
        return made

    def as_decoder_input(self, encoded: Residual, rows: int) -> Residual:
        """`encoded` in the first of `rows` rows that the decoder's graphs read; what stands in the
        others is nobody's."""
        _copied_residual(encoded, self.decoder_input)
        return self.decoder_input.rows(slice(rows))


def _copied(values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: len(values)].copy_(values)


def _copied_residual(residual: Residual, memory: Residual) -> Residual:
    return Residual(_copied(residual.streams, memory.streams), _copied(residual.pre, memory.pre))
