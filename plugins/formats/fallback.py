"""Row formats that older kernels keep instead of the trained ones. Accepted, never the default.

They store more precision than the model was trained with, so their numbers differ from the trained
formats'; the byte layouts are those of vLLM 0.33 on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.formats.mxfp8 import MxFp8
from plugins.formats.rounding import decode_e8m0, straight_through, work_dtype

_AMAX_FLOOR = 1e-4
_SCALE_ALIGNMENT = 8


@dataclass(frozen=True)
class Fp8WithBf16Rope:
    """E4M3 in groups of 64 for the unrotated dims, bfloat16 for the last `rope_dim` ones."""

    rope_dim: int
    group: int = 64

    def _format(self) -> MxFp8:
        return MxFp8(_AMAX_FLOOR, self.group)

    def data_bytes(self, width: int) -> int:
        return width - self.rope_dim + 2 * self.rope_dim

    def scale_bytes(self, width: int) -> int:
        """One byte per group, padded with zeros to a multiple of eight."""
        used = (width - self.rope_dim) // self.group
        return -(-used // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plain = values.shape[-1] - self.rope_dim
        codes, scale = self._format().pack(values[..., :plain])
        rope = values[..., plain:].to(torch.bfloat16).contiguous().view(torch.uint8)
        padding = self.scale_bytes(values.shape[-1]) - scale.shape[-1]
        scale = torch.nn.functional.pad(scale, (0, padding))
        return torch.cat([codes, rope], dim=-1), scale

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        plain = data.shape[-1] - 2 * self.rope_dim
        values = self._format().unpack(data[..., :plain], scale[..., : plain // self.group], dtype)
        rope = data[..., plain:].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat([values, rope], dim=-1)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        return straight_through(lambda v: self.unpack(*self.pack(v), v.dtype), values)


@dataclass(frozen=True)
class Fp8RowScale:
    """E4M3 with one float32 power-of-two scale for the whole row of `width` values."""

    width: int

    def _format(self) -> MxFp8:
        return MxFp8(_AMAX_FLOOR, self.width)

    def data_bytes(self, width: int) -> int:
        return width

    def scale_bytes(self, width: int) -> int:
        return 4

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = self._format().pack(values)
        factor = decode_e8m0(scale, torch.float32).clone(memory_format=torch.contiguous_format)
        return codes, factor.view(torch.uint8)

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = work_dtype(dtype)
        factor = scale.contiguous().view(torch.float32).to(wide)
        return (data.view(torch.float8_e4m3fn).to(wide) * factor).to(dtype)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        return self._format().round(values)
