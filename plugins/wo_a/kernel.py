"""The grouped output projection in the Triton language; docs/kernels/wo_a.md has its floor.

The kernels are those of the linear layer, with a program for every group's tile of outputs.
"""

from __future__ import annotations

import torch

from plugins.device.launch import needs_reference
from plugins.linear import LinearWeight
from plugins.linear.kernel import DECODED_ROWS, decode, packed_weight, product, round_input
from plugins.registry import OPERATORS


def wo_a(o: torch.Tensor, weight: LinearWeight, groups: int) -> torch.Tensor:
    """As the reference, whose arguments and result these are.

    Precision and what a row's bits depend on are those of the linear layer's kernels. With float64,
    a gradient or a weight that does not fit the reference runs.
    """
    rows, heads, dim = o.shape
    packed = packed_weight(weight)
    value = weight.value if packed is None else None
    outputs, width = packed.shape if packed is not None else weight.value.shape
    fits = heads % groups == 0 and outputs % groups == 0 and width == heads // groups * dim
    if needs_reference(o, value) or not fits:
        reference: torch.Tensor = OPERATORS["wo_a"].reference(o, weight, groups)
        return reference
    x = o.reshape(rows, heads * dim)
    if packed is not None:
        if 0 < rows < DECODED_ROWS:
            return product(x, weight, packed, groups)
        value = decode(packed, o.dtype)
    assert value is not None
    grouped = round_input(x, weight).view(rows, groups, width).transpose(0, 1)
    per_group = value.view(groups, outputs // groups, width).transpose(1, 2)
    return torch.bmm(grouped, per_group).transpose(0, 1).reshape(rows, outputs)
