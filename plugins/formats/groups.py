"""What all group formats share: one scale per group of neighbours along the last dim."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from plugins.formats.rounding import grouped, split_last, straight_through, work_dtype


class GroupFormat(ABC):
    """Values code · step, where the step of each `group` is stored as a one-byte scale."""

    group: int

    @abstractmethod
    def data_bytes(self, width: int) -> int: ...

    def scale_bytes(self, width: int) -> int:
        return width // self.group

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n] → codes uint8 [..., data_bytes(n)] and scales uint8 [..., n / group]."""
        groups = grouped(values, self.group)
        scale = self._scale(groups)
        codes = self._encode(groups / self._step(scale, groups.dtype).unsqueeze(-1))
        return codes.flatten(-2), scale

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of pack, [..., n] in `dtype`."""
        wide = work_dtype(dtype)
        groups = split_last(self._decode(data, wide), self.group)
        return (groups * self._step(scale, wide).unsqueeze(-1)).flatten(-2).to(dtype)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """unpack(pack(values)) in the dtype of `values`, gradient straight through."""
        return straight_through(self._round, values)

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        groups = grouped(values, self.group)
        step = self._step(self._scale(groups), groups.dtype).unsqueeze(-1)
        return self._snap(groups / step).mul_(step).flatten(-2).to(values.dtype)

    @abstractmethod
    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        """Scale bytes [...] of groups [..., group]."""

    @abstractmethod
    def _step(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What a code counts in, [...] in `dtype`, for scale bytes [...]."""

    @abstractmethod
    def _encode(self, quotients: torch.Tensor) -> torch.Tensor:
        """Code bytes of values / step."""

    @abstractmethod
    def _decode(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Code values [..., n] in `dtype`."""

    @abstractmethod
    def _snap(self, quotients: torch.Tensor) -> torch.Tensor:
        """values / step, rounded to the nearest code; a new tensor."""
