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
    """Let the next launch begin as soon as there is room, and wait for the one before this.

    Comes before a program's first access to memory that another launch writes, and before its
    first store: then whatever waits for this launch waits for all before it too, even where it
    began before this one went on. A launch with OVERLAP but without `launch_pdl` runs as any other.
    """
    if OVERLAP:
        # The next one's programs are set up while this one waits; they wait for its end.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
