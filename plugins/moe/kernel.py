"""The mixture of experts in the Triton language; docs/kernels/moe.md has its floor and layout.

Six launches: group the pairs of token and expert, round the inputs, w1 and w3 with the activation,
round that, w2, add up. Routed and shared experts share the launches. Sizes follow from shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, Limits, limits, needs_reference, padded
from plugins.device.overlap import overlaps
from plugins.moe.device_weights import FLOAT8, DeviceExperts, device_experts
from plugins.moe.kernel_hopper import down_hopper, gate_up_hopper
from plugins.moe.kernel_product import down, gate_up
from plugins.moe.kernel_route import combine, round_rows, route
from plugins.moe.kernel_shared import shared_rows, stands_apart
from plugins.moe.reference import ExpertWeights
from plugins.registry import OPERATORS

_COMBINE_TILE = 1024
# Outputs of a program: of w1 and of w3, and of w2.
_TILES = (64, 128)
# Programs that share the rows of an expert, at most.
_MAX_BLOCKS = 8
# Bytes of shared memory for 128 rows of values and three tiles under way.
_ROOMY = 160_000


class _Rows(NamedTuple):
    """What the products read: routed rows as values or as E4M3 codes and their powers, and shared
    rows; stand-ins for what they do not read."""

    values: torch.Tensor
    codes: torch.Tensor
    powers: torch.Tensor
    shared: torch.Tensor


def _inputs(
    x: torch.Tensor, routed: DeviceExperts, shared: DeviceExperts, stored: int, split: int
) -> _Rows:
    """x [R, W], rounded to MXFP8 for the experts that want it. Routed experts read rows before
    `split` (of which 0 means all), shared ones those from there on."""
    rows, width = x.shape
    as_codes = stored == FLOAT8
    end_codes = (split or rows) if as_codes else 0
    first_values = rows
    if shared.quantized and shared.num_experts:
        first_values = split
    if routed.quantized and not as_codes:
        first_values = 0
    if first_values == rows and not as_codes:
        return _Rows(x, x, x, x)
    values, codes, powers = x, x, x
    if first_values < rows:
        values = torch.empty_like(x)
    if as_codes:
        codes = torch.empty(end_codes, width, dtype=torch.float8_e4m3fn, device=x.device)
        codes = codes.view(torch.uint8) if INTERPRETED else codes
        powers = torch.empty(end_codes, dtype=torch.float32, device=x.device)
    head, rest = _halves(width)
    round_rows[(rows,)](
        x, x.stride(0), values, codes, powers, first_values, end_codes,
        width, head, rest, first_values < rows, as_codes, _hardware(x.device),
        num_warps=max(1, min(8, head // 512)), **_launch(x.device),
    )  # fmt: skip
    return _Rows(
        values if routed.quantized else x, codes, powers, values if shared.quantized else x
    )


def _halves(width: int) -> tuple[int, int]:
    """Powers of two that hold a row together, of 128 columns or more: of 5120, 4096 and 1024."""
    head = max(128, padded(width + 1) // 2)
    return head, padded(width - head, 128) if width > head else 0


def _hardware(device: torch.device) -> bool:
    return limits(device).float8 and not INTERPRETED


def _launch(device: torch.device) -> dict[str, bool]:
    """Options of every launch."""
    overlap = overlaps(device)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


class HopperTile(NamedTuple):
    """Of a program of kernel_hopper.py: weight rows, and rows of tokens in one product and in a
    second one; warps, stages, and slices of a step."""

    weights: int
    rows: int
    more: int
    warps: int
    stages: int
    slices: int

    def arguments(self) -> dict[str, int]:
        return {
            "N": self.weights, "ROWS": self.rows, "MORE": self.more, "WARPS": self.warps,
            "STAGES": self.stages, "SLICES": self.slices, "num_warps": self.warps,
        }  # fmt: skip


def hopper_tile(pairs: int) -> HopperTile:
    """For so many pairs of an expert on average."""
    if pairs <= 80:
        return HopperTile(128, 64, 32, 4, 4, 1)
    return HopperTile(128, 128, 0, 4, 4, 2)


def most_shared_rows(row_tile: int) -> int:
    """Rows of a shared expert's program: more would take registers from the chosen experts'."""
    return 32 if row_tile <= 32 else 64


def warps(row_tile: int) -> int:
    return 8 if row_tile >= 128 else 4


def stages(device: Limits, *, wide: bool) -> int:
    """Tiles under way. `wide`: float32, twice the size."""
    return 2 if wide or device.shared_memory < _ROOMY else 3


def moe(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    *,
    swiglu_limit: float,
) -> torch.Tensor:
    """As the reference, whose arguments and result these are.

    Released FP4 experts and bfloat16 rows are multiplied as E4M3, whose sums of 256 products are
    added in float32, or stay in the tensor core where kernel_hopper.py takes many rows; otherwise
    products take bfloat16 operands for bfloat16 rows and three TF32 products for float32 ones. A
    row's experts are added in ascending order, then the shared ones.
    With float64, a gradient, or experts in several formats the reference runs.
    """
    chosen, always = device_experts(routed, u.dtype), device_experts(shared, u.dtype)
    if chosen is None or always is None or needs_reference(u, weights):
        reference: torch.Tensor = OPERATORS["moe"].reference(
            u, ids, weights, routed, shared, swiglu_limit=swiglu_limit
        )
        return reference
    total = torch.empty_like(u, memory_format=torch.contiguous_format)
    if total.numel():
        u, ids, weights = u.contiguous(), ids.contiguous(), weights.contiguous()
        _run(u, ids, weights, chosen, always, shared, swiglu_limit, total)
    return total


def _run(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    routed: DeviceExperts,
    shared: DeviceExperts,
    shared_weights: ExpertWeights,
    limit: float,
    total: torch.Tensor,
) -> None:
    (rows, width), top_k, device = u.shape, ids.shape[1], u.device
    pairs, inter = rows * top_k, routed.inter
    hit = min(routed.num_experts, pairs)
    segments = torch.empty(hit, 3, dtype=torch.int32, device=device)
    order, places = torch.empty(2, pairs, dtype=torch.int32, device=device).unbind(0)
    chunk = min(4096, padded(pairs))
    launch = _launch(device)
    route[(hit,)](
        ids, pairs, routed.num_experts, segments, order, places,
        padded(routed.num_experts + 1), chunk, num_warps=8 if chunk > 1024 else 4,
        **launch,
    )  # fmt: skip

    # Rows of a program: about as many as an expert has, and all of a few tokens for a shared one.
    wide = u.dtype == torch.float32
    most_rows = 32 if wide or limits(device).shared_memory < _ROOMY else 128
    row_tile = min(most_rows, padded(triton.cdiv(pairs, hit)))
    shared_tile = min(most_shared_rows(row_tile), padded(rows))
    formats = routed.gate_up, shared.gate_up
    hopper = None
    if row_tile >= 64 and _takes_hopper(routed, width, device):
        hopper = hopper_tile(triton.cdiv(pairs, hit))
        row_tile = hopper.rows + hopper.more
    blocks = min(_MAX_BLOCKS, triton.cdiv(pairs, hit * row_tile))
    x = _inputs(u, routed, shared, formats[0].stored, 0)
    # Of those in the same launches.
    num_shared = 0 if hopper is not None or stands_apart(u) else shared.num_experts
    activation = u.new_empty((pairs + num_shared * rows, inter))
    common: dict[str, Any] = {
        "HARDWARE": _hardware(device),
        "DOT": tl.float32 if wide else tl.bfloat16,
        "WARPS": warps(row_tile),
        "WIDEN": INTERPRETED,
        "num_warps": warps(row_tile),
        "num_stages": stages(limits(device), wide=wide),
        **launch,
    }
    sizes = {
        "ROWS": row_tile, "SHARED_ROWS": shared_tile, "SHARED": num_shared,
        "WIDTH": width, "INTER": inter,
    }  # fmt: skip
    if hopper is None:
        grid = (blocks, triton.cdiv(inter, _TILES[0]), num_shared + hit)
        gate_up[grid](
            x.values, x.shared, x.codes, x.powers, segments, order, weights,
            routed.table, routed.gate_up_exponents, shared.table, activation, rows, pairs, limit,
            TOP_K=top_k, TILE=_TILES[0], INNER=_inner(width),
            STORED=formats[0].stored, WORDS=formats[0].words,
            SHARED_STORED=formats[1].stored, SHARED_WORDS=formats[1].words, **sizes, **common,
        )  # fmt: skip
    else:
        grid = (blocks, triton.cdiv(inter, hopper.weights // 2), hit)
        gate_up_hopper[grid](
            x.codes, x.powers, segments, order, weights, routed.table, routed.gate_up_exponents,
            activation, limit, TOP_K=top_k, WIDTH=width, INTER=inter, **hopper.arguments(),
        )  # fmt: skip

    formats = routed.down, shared.down
    a = _inputs(activation, routed, shared, formats[0].stored, pairs)
    y = torch.empty(pairs + shared.num_experts * rows, width, dtype=torch.float32, device=device)
    if hopper is None:
        grid = (blocks, triton.cdiv(width, _TILES[1]), num_shared + hit)
        down[grid](
            a.values, a.shared, a.codes, a.powers, segments,
            routed.table, routed.down_exponents, shared.table, y, rows, pairs,
            TILE=_TILES[1], INNER=_inner(inter),
            STORED=formats[0].stored, WORDS=formats[0].words,
            SHARED_STORED=formats[1].stored, SHARED_WORDS=formats[1].words, **sizes, **common,
        )  # fmt: skip
    else:
        down_hopper[blocks, triton.cdiv(width, hopper.weights), hit](
            a.codes, a.powers, segments, routed.table, routed.down_exponents, y,
            WIDTH=width, INTER=inter, **hopper.arguments(),
        )  # fmt: skip
    if num_shared < shared.num_experts:
        shared_rows(x.shared, shared_weights, limit, y[pairs:])
    tile = min(_COMBINE_TILE, padded(width))
    combine[(rows, triton.cdiv(width, tile))](
        y, places, total, rows, pairs, top_k, padded(top_k, 1), shared.num_experts, width, tile,
        **launch,
    )  # fmt: skip


def _takes_hopper(routed: DeviceExperts, width: int, device: torch.device) -> bool:
    """Released FP4 experts of two pairs of steps or more, on compute capability 9.0."""
    if INTERPRETED or not limits(device).warp_groups:
        return False
    both = routed.gate_up.stored == routed.down.stored == FLOAT8
    return both and all(size >= 512 and size % 256 == 0 for size in (width, routed.inter))


def _inner(width: int) -> int:
    """Columns of a step: groups are 32 long, words of scales four groups."""
    return min(128, padded(width, 32))
