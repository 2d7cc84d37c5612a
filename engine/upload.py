"""Arrays of the host on a device: many by one copy that nobody waits for.

    tokens, positions = upload([tokens, positions], "cuda")

On a CPU a tensor shares its array's memory. For a GPU the arrays are laid end to end in pinned
memory, which the allocator gives to nobody else before the copy has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ALIGNMENT = 16


def upload(arrays: Sequence[Array], device: torch.device | str) -> list[torch.Tensor]:
    """The arrays as tensors of the same shapes and dtypes on `device`."""
    if torch.device(device).type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    return views(packed(arrays).to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[Array]) -> torch.Tensor:
    """The arrays' bytes in new pinned memory, uint8 [`packed_size`], as `views` finds them."""
    memory = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True)
    fill(memory, arrays)
    return memory


def fill(memory: torch.Tensor, arrays: Sequence[Array]) -> None:
    """Write the arrays to host memory of `packed_size` bytes."""
    host = memory.numpy()
    for array, start in zip(arrays, _starts(arrays), strict=True):
        host[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def packed_size(arrays: Sequence[Array]) -> int:
    """Bytes of the arrays laid end to end."""
    return sum(_aligned(array.nbytes) for array in arrays)


def views(memory: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Tensors with the shapes and dtypes of `arrays` over memory laid out by `packed`."""
    made = []
    for array, start in zip(arrays, _starts(arrays), strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        made.append(memory[start : start + array.nbytes].view(dtype).view(array.shape))
    return made


def _starts(arrays: Sequence[Array]) -> list[int]:
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += _aligned(array.nbytes)
    return starts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
