"""The two rotary frequency tables of a model: window-only layers and compressed layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import ModelConfig


@dataclass(frozen=True)
class RopeTables:
    """float64 [qk_rope_head_dim / 2] each; see ModelConfig.inv_freq."""

    plain: torch.Tensor | None  # layers of ratio 0, draft stages
    compressed: torch.Tensor | None  # layers of ratio 1 and 2: YaRN at every length
    ratios: tuple[int, ...]

    @staticmethod
    def build(config: ModelConfig, device: torch.device) -> RopeTables:
        def table(compressed: bool) -> torch.Tensor | None:
            layers = (
                layer
                for layer in range(config.num_layers_total)
                if (config.ratio(layer) > 0) == compressed
            )
            layer = next(layers, None)
            if layer is None:
                return None
            return torch.tensor(config.inv_freq(layer), dtype=torch.float64, device=device)

        return RopeTables(table(False), table(True), config.compress_ratios)

    def of(self, layer: int) -> torch.Tensor:
        table = self.compressed if self.ratios[layer] else self.plain
        assert table is not None, "every layer's kind was tabulated"
        return table
