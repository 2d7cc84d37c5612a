"""The one table of cache-row layouts: what a row's bytes are, and how many of them there are.

A row is its data bytes directly followed by its scale bytes; of index keys a page has all rows'
data bytes first and then all rows' scale bytes, so that whole groups are aligned. Every size is a
formula of the model dims; at the released dims they give the published 890 bytes of global cache
per token.
Sources: the technical report (cache section), vLLM 0.33 and SGLang 0.5 record layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch

from plugins.formats import index_keys, mxfp8, nvfp4
from plugins.formats.fallback import Fp8RowScale, Fp8WithBf16Rope


class RowFormat(Protocol):
    """A number format along the last dim. `pack` and `unpack` are exact inverses on its values."""

    def data_bytes(self, width: int) -> int: ...

    def scale_bytes(self, width: int) -> int: ...

    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def unpack(
        self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor: ...

    def round(self, values: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class RecordLayout:
    """Rows of `width` values in `format`. Non-finite input poisons its group: it reads as NaN.

    split: in a page all rows' data bytes come before all rows' scale bytes.
    """

    name: str
    width: int
    format: RowFormat
    split: bool = False

    @property
    def data_bytes(self) -> int:
        return self.format.data_bytes(self.width)

    @property
    def scale_bytes(self) -> int:
        return self.format.scale_bytes(self.width)

    @property
    def bytes_per_row(self) -> int:
        return self.data_bytes + self.scale_bytes

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Quantise float values [..., width] to uint8 [..., bytes_per_row]. No gradient."""
        self._check(values, self.width, "values")
        return torch.cat(self.format.pack(values), dim=-1)

    def unpack(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values [..., width] in `dtype` of uint8 rows [..., bytes_per_row]."""
        self._check(data, self.bytes_per_row, "bytes")
        return self.format.unpack(data[..., : self.data_bytes], data[..., self.data_bytes :], dtype)

    def parts(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the data [..., R, data_bytes] and the scale bytes [..., R, scale_bytes] of pages
        of R rows, uint8 [..., R, bytes_per_row]."""
        if not self.split:
            return pages[..., : self.data_bytes], pages[..., self.data_bytes :]
        rows = pages.shape[-2]
        size = rows * self.data_bytes
        page = pages.flatten(-2)
        data = torch.unflatten(page[..., :size], -1, (rows, self.data_bytes))
        return data, torch.unflatten(page[..., size:], -1, (rows, self.scale_bytes))

    def pages(self, rows: torch.Tensor) -> torch.Tensor:
        """Packed rows, uint8 [..., R, bytes_per_row], as the bytes of pages of R rows."""
        pages = torch.empty_like(rows, memory_format=torch.contiguous_format)
        data, scale = self.parts(pages)
        data.copy_(rows[..., : self.data_bytes])
        scale.copy_(rows[..., self.data_bytes :])
        return pages

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """unpack(pack(values)), same shape and dtype; the gradient passes straight through."""
        self._check(values, self.width, "values")
        return self.format.round(values)

    def _check(self, rows: torch.Tensor, expected: int, unit: str) -> None:
        if rows.shape[-1] != expected:
            raise ValueError(
                f"expected rows of {expected} {unit} for {self.name}, got {tuple(rows.shape)}; "
                "use the layout that was built from this model's dims"
            )


def _layout(
    name: str, width: int, row_format: RowFormat, group: int, *, split: bool = False
) -> RecordLayout:
    if width <= 0 or width % group:
        raise ValueError(
            f"expected a {name} row width that is a positive multiple of {group}, got {width}; "
            "this record scales whole groups"
        )
    return RecordLayout(name, width, row_format, split)


def main_record(head_dim: int) -> RecordLayout:
    """Compressed main KV: NVFP4 without a global scale, 288 B at 512."""
    return _layout("main", head_dim, nvfp4.CACHE, nvfp4.CACHE.group)


def window_record(head_dim: int) -> RecordLayout:
    """Window KV: MXFP8, rotated dims included, 528 B at 512."""
    return _layout("window", head_dim, mxfp8.ACTIVATION, mxfp8.ACTIVATION.group)


def index_record(index_head_dim: int) -> RecordLayout:
    """Index keys: MXFP4 with signs moved, data apart from scales in a page, 68 B at 128."""
    keys = index_keys.INDEX_KEYS
    return _layout("index", index_head_dim, keys, keys.group, split=True)


def engram_record(engram_head_dim: int) -> RecordLayout:
    """Engram table rows: MXFP8 as released, without the activation's amax floor, 264 B at 256."""
    return _layout("engram", engram_head_dim, mxfp8.WEIGHT, mxfp8.WEIGHT.group)


def nvfp4_engram_record(engram_head_dim: int, global_scale: float) -> RecordLayout:
    """Engram table rows requantised to NVFP4: 144 B at 256."""
    layout = nvfp4.NvFp4(global_scale=global_scale)
    return _layout("nvfp4_engram", engram_head_dim, layout, layout.group)


def window_fallback_record(head_dim: int, rope_dim: int) -> RecordLayout:
    """FP8 with the rotated dims in bfloat16: 448 + 128 + 7 scales + 1 pad = 584 B at (512, 64)."""
    plain = head_dim - rope_dim
    group = min(64, plain)
    if plain <= 0 or plain % group:
        raise ValueError(
            f"expected head_dim − rope_dim to be a positive multiple of 64 or below it, got "
            f"{head_dim} − {rope_dim}; use window_record, which has no such limit"
        )
    return RecordLayout("window_fallback", head_dim, Fp8WithBf16Rope(rope_dim, group))


def index_fallback_record(index_head_dim: int) -> RecordLayout:
    """FP8 index keys with one float32 power-of-two scale per row: 132 B at 128."""
    return _layout("index_fallback", index_head_dim, Fp8RowScale(index_head_dim), 1)


def global_bytes_per_token(
    ratios: Sequence[int], main: RecordLayout, index: RecordLayout
) -> Fraction:
    """Global cache bytes per token, exact: one main row and one index row per `r` tokens.

    `ratios` has one entry per KV source, [2, 2, 2, 1] as released. Window rows, compressor tails
    and draft rows are a constant per request and are not counted here.
    """
    rows = sum((Fraction(1, ratio) for ratio in ratios), Fraction(0))
    return rows * (main.bytes_per_row + index.bytes_per_row)
