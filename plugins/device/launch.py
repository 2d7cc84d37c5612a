"""What every launch asks: whether the kernel may run at all, and in which sizes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton import knobs, next_power_of_2, runtime

# The interpreter multiplies bfloat16 operands wrongly; kernels widen them there.
INTERPRETED = bool(knobs.runtime.interpret)


def needs_reference(*operands: torch.Tensor | None) -> bool:
    """Whether the torch reference must run: float64, or a gradient through the operator."""
    return any(
        x is not None
        and (x.dtype == torch.float64 or (x.requires_grad and torch.is_grad_enabled()))
        for x in operands
    )


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it whose last dim is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; tensor cores take 16 or more."""
    return max(least, int(next_power_of_2(max(size, 1))))


class Limits(NamedTuple):
    """shared_memory: bytes that one program may take. tensor_memory: whether large products put
    their sums there (compute capability 10), of which there are 512 columns. float8: whether
    products take E4M3 operands (from 8.9 on). multiprocessors: how many there are. early: whether
    a kernel may start before the one ahead of it has ended (from 9.0 on). warp_groups: whether
    products are those of four warps, of which Gluon's kernels for Hopper are made."""

    shared_memory: int
    tensor_memory: bool
    float8: bool
    multiprocessors: int = 1
    early: bool = False
    warp_groups: bool = False


@functools.cache
def limits(device: torch.device) -> Limits:
    """Of a device of the active driver; of a CPU, where kernels are interpreted, none. All that a
    launch depends on is asked here: where kernels are compiled ahead there is no device to ask."""
    if device.type == "cpu":
        return Limits(1 << 30, False, True)
    driver = runtime.driver.active
    properties = driver.utils.get_device_properties(device.index or 0)
    capability = driver.get_current_target().arch
    return Limits(
        shared_memory=int(properties["max_shared_mem"]),
        tensor_memory=capability // 10 == 10,
        float8=capability >= 89,
        multiprocessors=int(properties["multiprocessor_count"]),
        early=capability >= 90,
        warp_groups=capability // 10 == 9,
    )
