"""One probe of the machine: which path the operators take, and the sentence that says why."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Capability:
    """`compute_capability` is (major, minor) of device 0, None without a CUDA device.

    `kernels`: the Triton-language kernels can run; otherwise every operator is its torch reference.
    """

    device: Literal["cpu", "cuda"]
    compute_capability: tuple[int, int] | None
    triton_language: bool
    kernels: bool
    reason: str


# The first generation whose tensor cores take E4M3 operands, which the kernels rely on.
MIN_COMPUTE_CAPABILITY = (8, 9)


@functools.cache
def probe() -> Capability:
    """Look once; later calls return the same answer."""
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    return describe(capability, importlib.util.find_spec("triton") is not None)


def describe(compute_capability: tuple[int, int] | None, triton_language: bool) -> Capability:
    """The decision as a function of what was found."""
    if compute_capability is None:
        reason = "operators run as their torch references on the CPU: no CUDA device was found"
        return Capability("cpu", None, triton_language, False, reason)
    found = "compute capability {}.{}".format(*compute_capability)
    if compute_capability < MIN_COMPUTE_CAPABILITY:
        needed = "{}.{}".format(*MIN_COMPUTE_CAPABILITY)
        reason = f"operators run as their torch references on CUDA: {found} is below {needed}"
        return Capability("cuda", compute_capability, triton_language, False, reason)
    if not triton_language:
        reason = (
            f"operators run as their torch references on CUDA ({found}): "
            "the Triton language package is not installed"
        )
        return Capability("cuda", compute_capability, False, False, reason)
    reason = f"operators run as Triton-language kernels on CUDA ({found})"
    return Capability("cuda", compute_capability, True, True, reason)
