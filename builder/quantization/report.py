"""What quantisation did to the weights, summed per tensor class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from plugins.formats.rounding import E2M1_MAX, E4M3_MAX
from plugins.linear import PackedFormat, PackedMatrix


@dataclass
class ClassTotals:
    """Sums over the weights of one class that changed their format."""

    tensors: int = 0
    values: int = 0
    source_bytes: int = 0
    output_bytes: int = 0
    squared_error: float = 0.0
    squared_values: float = 0.0
    saturated: int = 0  # values beyond the largest code of their block
    zero_scales: int = 0  # blocks whose scale decodes to 0
    zero_blocks: int = 0  # blocks that hold nothing but zeros

    def add_rows(self, source: torch.Tensor, matrix: PackedMatrix) -> None:
        """Count rows: float32 values [n, K] before, and their stored form."""
        wide = source.double()
        self.squared_error += float((matrix.dequantize().double() - wide).square().sum())
        self.squared_values += float(wide.square().sum())
        step = matrix.steps()
        blocks = source.view(*step.shape, -1).abs()
        two = matrix.format in (PackedFormat.NVFP4, PackedFormat.FP4_ROWS)
        largest = E2M1_MAX if two else E4M3_MAX
        self.saturated += int((blocks > largest * step.unsqueeze(-1)).sum())
        self.zero_scales += int((step == 0).sum())
        self.zero_blocks += int((blocks.amax(-1) == 0).sum())

    def add(self, other: ClassTotals) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def figures(self) -> dict[str, float | int]:
        """As the report shows them."""
        error = math.sqrt(self.squared_error / self.squared_values) if self.squared_values else 0.0
        return {
            "tensors": self.tensors,
            "values": self.values,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "relative_error": error,
            "saturated": self.saturated,
            "zero_scales": self.zero_scales,
            "zero_blocks": self.zero_blocks,
        }


def merged(shards: Iterable[Mapping[str, Any]]) -> dict[str, ClassTotals]:
    """Totals per class of the shards' sums, as JSON keeps them."""
    totals: dict[str, ClassTotals] = {}
    for shard in shards:
        for title, sums in shard.items():
            totals.setdefault(title, ClassTotals()).add(ClassTotals(**sums))
    return totals


def render_report(report: Mapping[str, Any]) -> Iterable[str]:
    """The report as lines for a terminal."""
    yield (
        f"  {'class':<16}{'tensors':>8}{'before':>12}{'after':>12}{'error':>10}"
        f"{'saturated':>11}{'zero scales':>13}"
    )
    for title, row in report["classes"].items():
        yield (
            f"  {title:<16}{row['tensors']:>8}{_mib(row['source_bytes']):>12}"
            f"{_mib(row['output_bytes']):>12}{row['relative_error']:>10.4f}"
            f"{row['saturated'] / max(row['values'], 1):>11.4%}{row['zero_scales']:>13}"
        )
    before, after = _mib(report["source_bytes"]), _mib(report["output_bytes"])
    yield f"  {'all files':<24}{before:>12}{after:>12}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
