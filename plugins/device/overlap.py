"""Launches that begin while the one before them ends.

From compute capability 9.0 on a kernel launched with `launch_pdl` may start before its predecessor
in the stream has ended: it waits for that one's results itself. What lies between two small
kernels, a microsecond or so, is then spent side by side.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, limits


def overlaps(device: torch.device) -> bool:
    """Whether kernels on it may begin early."""
    return limits(device).early and not INTERPRETED


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait for the launch before this one, and let the next begin as soon as there is room.

    Comes before a program's first access to memory that another launch writes, and before its
    first store: then whatever waits for this launch waits for all before it too. A launch with
    OVERLAP but without `launch_pdl` runs as any other.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
