"""Sizes and hostile inputs of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class SampleCase:
    """Every row has the same settings; `kind` shapes the logits."""

    name: str
    rows: int
    vocab: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    kind: Literal["normal", "equal", "masked"] = "normal"

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
        """Keyword operands of the operator, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        logits = 2.0 * torch.randn(self.rows, self.vocab, generator=draw)
        if self.kind == "equal":
            logits.fill_(1.0)
        elif self.kind == "masked":
            logits[:, torch.arange(self.vocab) != self.vocab // 2] = float("-inf")
        return {
            "logits": logits.to(dtype),
            "temperature": torch.full((self.rows,), self.temperature),
            "top_k": torch.full((self.rows,), self.top_k),
            "top_p": torch.full((self.rows,), self.top_p),
            "min_p": torch.full((self.rows,), self.min_p),
            "seed": torch.arange(self.rows) - 1,
            "output_index": torch.arange(self.rows),
        }


CASES = (
    SampleCase("no rows", 0, 17, 1.0),
    SampleCase("greedy", 3, 17, 0.0),
    SampleCase("greedy among equals", 3, 17, 0.0, kind="equal"),
    SampleCase("one token allowed", 3, 17, 1.0, kind="masked"),
    SampleCase("plain draw", 5, 1000, 0.7),
    SampleCase("top-k above the vocabulary", 3, 17, 1.0, top_k=100),
    SampleCase("top-k among equals", 5, 17, 1.0, top_k=3, kind="equal"),
    SampleCase("top-p of nothing", 3, 17, 1.0, top_p=0.0),
    SampleCase("both limits", 5, 1000, 1.3, top_k=20, top_p=0.5),
    SampleCase("min-p", 5, 1000, 0.8, min_p=0.2),
    SampleCase("min-p of all", 5, 17, 1.0, min_p=1.0, kind="equal"),
    SampleCase("all three limits", 5, 1000, 1.1, top_k=300, top_p=0.95, min_p=0.02),
    SampleCase("nearly greedy", 3, 17, 1e-9),
    SampleCase("one token", 2, 1, 1.0, top_p=0.9),
)
