"""E4M3 weights times one long bfloat16 row, on Hopper, in Gluon; docs/kernels/linear.md
says why in this way.

A program has a few outputs and all of their inputs, whose codes are on their way to registers
before the launch ahead has ended. Products are exact, and added in float32.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from plugins.device.launch import limits, unit_stride
from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.device.weights import FP8_BLOCKS as _FP8_BLOCKS
from plugins.device.weights import MXFP8, DeviceWeight
from plugins.linear.kernel_rounding import power, rounded
from plugins.linear.weight import LinearWeight

# Inputs of a row that is rounded, wo_b's, and of one of a group's that is not, wo_a's.
ROUNDED, AS_IT_IS = 8192, 4096
# Of a program: outputs, all of one block, and warps; bytes that a thread reads at a time.
OUTPUTS, WARPS, BYTES = 4, 4, 16

FP8_BLOCKS = gl.constexpr(_FP8_BLOCKS.value)


@gluon.jit(do_not_specialize=["per_group"])
def linear_long(
    x, codes, scale, y, per_group, STORED: gl.constexpr,
    K: gl.constexpr, OUTPUTS: gl.constexpr, BYTES: gl.constexpr, ROUND: gl.constexpr,
):  # fmt: skip
    """OUTPUTS of one row from the K inputs of their group, which has per_group programs. ROUND: the
    row is rounded to MXFP8 here."""
    BLOCKS: gl.constexpr = BYTES * gl.num_warps()  # of 32 inputs, of a step
    STEPS: gl.constexpr = K // 32 // BLOCKS
    TILE: gl.constexpr = gl.BlockedLayout(
        [1, 1, BYTES], [1, BYTES, 32 // BYTES], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    let_next_begin()
    first = gl.program_id(0) * OUTPUTS
    output = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
    byte = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    column = 32 * block[None, :, None] + byte[None, None, :]
    at = codes.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    at = at + (output.to(gl.int64) * K)[:, None, None] + column
    scale_at = scale + block[None, :]
    if STORED == FP8_BLOCKS:
        scale_at += first // 32 * (K // 32)
    else:
        scale_at += (output * (K // 32))[:, None]
    kept, scales = (), ()
    for i in gl.static_range(STEPS):
        kept += (gl.load(at + i * 32 * BLOCKS),)
        scales += (gl.load(scale_at + i * BLOCKS),)
    wait()
    x_at = x + gl.program_id(0) // per_group * K + column
    total = gl.zeros([OUTPUTS, BLOCKS, 32], gl.float32, TILE)
    if STORED != FP8_BLOCKS:
        total = _of_threads(total, BYTES)
    for i in gl.static_range(STEPS):
        value = gl.load(x_at + i * 32 * BLOCKS).to(gl.float32)
        factor = power(scales[i].to(gl.int32))
        if ROUND:
            value, byte_of_row = rounded(value)
            value = value.to(gl.float32)
            factor = factor * power(byte_of_row)
        if STORED == FP8_BLOCKS:
            # All outputs are of one block of the weight, so that its scales can join the row.
            total += kept[i].to(gl.float32) * (value * factor[:, :, None])
        else:
            part = _of_threads(kept[i].to(gl.float32) * value, BYTES)
            factor = gl.convert_layout(factor, gl.SliceLayout(2, part.type.layout))
            total += part * factor[:, :, None]
    sums = gl.sum(gl.sum(total, axis=2), axis=1)
    sums = gl.convert_layout(sums, output.type.layout)
    gl.store(y + output, sums.to(y.dtype.element_ty))


@gluon.jit
def _of_threads(products, BYTES: gl.constexpr):
    """What each thread's columns of products [N, B, 32] add up to, [N, B, 32 / BYTES]."""
    N: gl.constexpr = products.shape[0]
    B: gl.constexpr = products.shape[1]
    return gl.sum(products.reshape([N, B, 32 // BYTES, BYTES]), axis=3)


def takes_long(x: torch.Tensor, kept: LinearWeight, weight: DeviceWeight, groups: int) -> bool:
    """Whether linear_long multiplies x [T, G·K] with `weight` [G·N, K], the form of `kept` on the
    device."""
    outputs, inner = weight.shape
    whole = inner == (ROUNDED if kept.quantized_input else AS_IT_IS)
    whole = whole and outputs // groups % OUTPUTS == 0 and kept.input_scale is None
    ours = weight.stored in (_FP8_BLOCKS.value, MXFP8.value) and whole
    one = x.shape[0] == 1 and x.dtype == torch.bfloat16
    return ours and one and limits(x.device).warp_groups


def long_product(
    x: torch.Tensor, weight: DeviceWeight, groups: int, *, rounds: bool
) -> torch.Tensor:
    """x [1, G·K], rounded to MXFP8 or not, times `weight` [G·N, K], group by group: [1, G·N]."""
    x, (outputs, inner) = unit_stride(x), weight.shape
    y = x.new_empty((1, outputs))
    programs = outputs // OUTPUTS
    linear_long[(programs,)](
        x, weight.codes, weight.scale, y, programs // groups, weight.stored,
        inner, OUTPUTS, BYTES, rounds,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return y
