"""The mixture of experts in the Triton language; docs/kernels/moe.md has its floor and layout.

Five launches: group the pairs of token and expert and round the inputs, w1 and w3 with the
activation, round that, w2, add up. Routed and shared experts share the launches. Sizes follow from
shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, Limits, limits, needs_reference, padded
from plugins.device.overlap import overlaps
from plugins.device.weights import NVFP4
from plugins.moe.device_weights import FLOAT8, DeviceExperts, device_experts
from plugins.moe.kernel_few import few_products, takes_few
from plugins.moe.kernel_hopper import product_hopper
from plugins.moe.kernel_product import SHARED_PARTS, down, gate_up
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
    """What the products read: routed rows as values, or as E4M3 codes or in float16 with powers,
    and shared rows; stand-ins for what they do not read."""

    values: torch.Tensor
    codes: torch.Tensor
    halves: torch.Tensor
    powers: torch.Tensor
    shared: torch.Tensor


class _Rounding(NamedTuple):
    """Rows to be rounded to MXFP8: what comes of them, and what kernel_route.py is told, whose
    `programs` may be none."""

    rows: _Rows
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int


def _rounding(
    x: torch.Tensor,
    routed: DeviceExperts,
    shared: DeviceExperts,
    stored: int,
    split: int,
    *,
    few: bool = False,
    many: bool = False,
) -> _Rounding:
    """x [R, W], for the experts that want it rounded. Routed experts read rows before `split` (of
    which 0 means all), shared ones those from there on. few: for kernel_few.py, whose experts in
    NVFP4 read float16 and all others codes; many: for kernel_hopper.py, whose chosen ones do."""
    rows, width = x.shape
    as_halves = many and stored == NVFP4.value
    as_codes = stored == FLOAT8 or (many and not as_halves)
    end_codes = (split or rows) if as_codes or as_halves else 0
    first_values = rows
    if few:
        kinds = {stored, *([shared.gate_up.stored] if shared.num_experts else [])}
        as_codes, as_halves = kinds != {NVFP4.value}, NVFP4.value in kinds
        end_codes = rows
    elif shared.quantized and shared.num_experts:
        first_values = split
    if routed.quantized and not end_codes:
        first_values = 0
    values, codes, halves, powers = x, x, x, x
    if first_values < rows:
        values = torch.empty_like(x)
    if as_codes:
        codes = torch.empty(end_codes, width, dtype=torch.float8_e4m3fn, device=x.device)
        codes = codes.view(torch.uint8) if INTERPRETED else codes
    if as_halves:
        halves = torch.empty(end_codes, width, dtype=torch.float16, device=x.device)
    if as_codes or as_halves:
        powers = torch.empty(end_codes, dtype=torch.float32, device=x.device)
    head, rest = _halves(width)
    return _Rounding(
        _Rows(
            values if routed.quantized else x, codes, halves, powers,
            values if shared.quantized else x,
        ),
        rows if end_codes or first_values < rows else 0,
        (x, x.stride(0), values, codes, halves, powers, first_values, end_codes),
        {
            "WIDTH": width, "HEAD": head, "REST": rest, "VALUES": first_values < rows,
            "CODES": as_codes, "HALVES": as_halves,
            "FLOAT8": _hardware(x.device),
        },
        max(1, min(8, head // 512)),
    )  # fmt: skip


def _round(rounding: _Rounding, device: torch.device) -> _Rows:
    if rounding.programs:
        round_rows[(rounding.programs,)](
            *rounding.arguments, **rounding.constants, num_warps=rounding.warps, **_launch(device)
        )
    return rounding.rows


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
    second one; how often fewer rows may halve the first; stages, whether codes are copied for two
    steps at once, and warps that multiply."""

    weights: int
    rows: int
    more: int
    levels: int
    stages: int
    wide: bool
    warps: int

    def constants(self) -> dict[str, int]:
        return {
            "N": self.weights, "ROWS": self.rows, "MORE": self.more,
            "LEVELS": self.levels, "STAGES": self.stages, "WIDE": self.wide, "WARPS": self.warps,
        }  # fmt: skip

    def programs(self, device: Limits) -> int:
        """One for a multiprocessor, or two of half as many warps."""
        return device.multiprocessors * 8 // self.warps

    def options(self) -> dict[str, int]:
        # Of 65536 registers, two programs of eight warps have 128 a thread.
        return {"num_warps": self.warps, **({"maxnreg": 128} if self.warps == 4 else {})}


def hopper_tile(pairs: int, stored: int) -> HopperTile:
    """For so many pairs of an expert on average."""
    released = stored == FLOAT8
    if pairs <= 72:
        wide = released or stored == NVFP4.value
        return HopperTile(128, 64, 16, 0, 5 if released else 3, wide, warps=4)
    # What float16 rows leave of the shared memory is too little for more than 128 of them.
    if pairs <= 192 or stored == NVFP4.value:
        return HopperTile(256, 128, 0, 2, 6 if released else 4, wide=False, warps=8)
    return HopperTile(128, 256, 32 if released else 0, 2, 4, wide=False, warps=8)


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

    Released FP4 experts of bfloat16 rows are multiplied as E4M3, whose sums of 256 products are
    added in float32, or stay in the tensor core where kernel_hopper.py takes many rows; so are
    shared experts beside kernel_few.py's few rows, and what both take in MXFP8; NVFP4 they multiply
    as float16. Otherwise products take bfloat16 operands for
    bfloat16 rows and three TF32 products for float32 ones. A row's experts are added in ascending
    order, then the shared ones.
    With float64, a gradient, or experts in several formats the reference runs.
    """
    chosen, always = device_experts(routed, u.dtype), device_experts(shared, u.dtype)
    if chosen is None or always is None or needs_reference(u, weights):
        if u.is_meta:  # nothing to record: the reference launches no kernel, and asks for values
            return torch.empty_like(u)
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
    # Rows of a program: about as many as an expert has, and all of a few tokens for a shared one.
    wide = u.dtype == torch.float32
    most_rows = 32 if wide or limits(device).shared_memory < _ROOMY else 128
    row_tile = min(most_rows, padded(triton.cdiv(pairs, hit)))
    hopper = None
    if row_tile >= 64 and _takes_hopper(u, routed, pairs):
        hopper = hopper_tile(triton.cdiv(pairs, hit), routed.gate_up.stored)
    segment = hopper.rows + hopper.more if hopper is not None else 0
    most_segments = hit + pairs // segment if segment else hit
    segments = torch.empty(most_segments, 3, dtype=torch.int32, device=device)
    num_segments = torch.empty(1, dtype=torch.int32, device=device)
    order, places = torch.empty(2, pairs, dtype=torch.int32, device=device).unbind(0)
    chunk = min(4096, padded(pairs))
    launch = _launch(device)
    formats = routed.gate_up, shared.gate_up
    many, as_halves = hopper is not None, routed.gate_up.stored == NVFP4.value
    few = not many and takes_few(u, triton.cdiv(pairs, hit), routed, shared)
    of_rows = _rounding(u, routed, shared, formats[0].stored, 0, few=few, many=many)
    x = of_rows.rows
    route[(hit + of_rows.programs,)](
        ids, pairs, routed.num_experts, hit, segments, num_segments, order, places,
        *of_rows.arguments, padded(routed.num_experts + 1), chunk, segment,
        LATE=few, **of_rows.constants, **launch,
        num_warps=8 if chunk > 1024 else max(4, of_rows.warps),
    )  # fmt: skip

    shared_tile = min(most_shared_rows(row_tile), padded(rows))
    blocks = min(_MAX_BLOCKS, triton.cdiv(pairs, hit * row_tile))
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
    places_of = segments, order
    if few:
        few_products(
            (x.codes, x.halves, x.powers), ids, places_of, weights, (routed, shared), activation,
            limit, matrices=2,
        )  # fmt: skip
    elif hopper is None:
        grid = (blocks, triton.cdiv(inter, _TILES[0]), num_shared * SHARED_PARTS.value + hit)
        gate_up[grid](
            x.values, x.shared, x.codes, x.powers, segments, order, weights,
            routed.table, routed.gate_up_exponents, shared.table, activation, rows, pairs, limit,
            TOP_K=top_k, TILE=_TILES[0], INNER=_inner(width), SHARED_INNER=_inner(width),
            STORED=formats[0].stored, WORDS=formats[0].words,
            SHARED_STORED=formats[1].stored, SHARED_WORDS=formats[1].words, **sizes, **common,
        )  # fmt: skip
    else:
        of_hopper = {"STORED": formats[0].stored, **hopper.constants(), **hopper.options()}
        product_hopper[(hopper.programs(limits(device)),)](
            x.halves if as_halves else x.codes, x.powers, segments, num_segments, order, weights,
            routed.table, routed.gate_up_exponents, activation, limit,
            TOP_K=top_k, COLUMNS=width, OUTPUTS=inter, MATRICES=2, **of_hopper,
        )  # fmt: skip

    formats = routed.down, shared.down
    rounding = _rounding(activation, routed, shared, formats[0].stored, pairs, few=few, many=many)
    a = _round(rounding, device)
    y = torch.empty(pairs + shared.num_experts * rows, width, dtype=torch.float32, device=device)
    if few:
        few_products(
            (a.codes, a.halves, a.powers), ids, places_of, weights, (routed, shared), y, limit,
            matrices=1,
        )  # fmt: skip
    elif hopper is None:
        grid = (blocks, triton.cdiv(width, _TILES[1]), num_shared * SHARED_PARTS.value + hit)
        down[grid](
            a.values, a.shared, a.codes, a.powers, segments,
            routed.table, routed.down_exponents, shared.table, y, rows, pairs,
            TILE=_TILES[1], INNER=_inner(inter),
            SHARED_INNER=_inner(inter, 128 if wide or shared_tile > 16 else 256),
            STORED=formats[0].stored, WORDS=formats[0].words,
            SHARED_STORED=formats[1].stored, SHARED_WORDS=formats[1].words, **sizes, **common,
        )  # fmt: skip
    else:
        product_hopper[(hopper.programs(limits(device)),)](
            a.halves if as_halves else a.codes, a.powers, segments, num_segments, order, weights,
            routed.table, routed.down_exponents, y, limit,
            TOP_K=1, COLUMNS=inter, OUTPUTS=width, MATRICES=1, **of_hopper,
        )  # fmt: skip
    if num_shared < shared.num_experts:
        shared_rows(x.shared, shared_weights, limit, y[pairs:])
    tile = min(_COMBINE_TILE, padded(width))
    combine[(rows, triton.cdiv(width, tile))](
        y, places, total, rows, pairs, top_k, padded(top_k, 1), shared.num_experts, width, tile,
        **launch,
    )  # fmt: skip


def _takes_hopper(u: torch.Tensor, routed: DeviceExperts, pairs: int) -> bool:
    """Experts of whole stages, on compute capability 9.0."""
    if INTERPRETED or not limits(u.device).warp_groups:
        return False
    width, inter = u.shape[1], routed.inter
    # Rows lie at offsets of 31 bits.
    near = max(u.numel(), pairs * inter) < 1 << 31
    return routed.many and near and width % 256 == inter % 256 == 0


def _inner(width: int, most: int = 128) -> int:
    """Columns of a step: groups are 32 long, words of scales four groups."""
    return min(most, padded(width, 32))
