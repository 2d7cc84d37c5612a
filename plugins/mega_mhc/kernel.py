"""Hyper-connections in the Triton language; docs/kernels/mega_mhc.md has their floor and layout.

One kernel passes once over the streams and does what it is asked to: expand, the products and the
squares of the next mix, collapse (`kernel_pass.py`). A second one adds those up, finishes the mix
and normalises what was collapsed, or a third one only normalises (`kernel_finish.py`). A row's sums
over the width are always made of the same parts in the same order, whether programs share a row or
not.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, needs_reference, padded, unit_stride
from plugins.device.overlap import overlaps
from plugins.mega_mhc import kernel_hopper as hopper
from plugins.mega_mhc.kernel_finish import finish, normalise
from plugins.mega_mhc.kernel_pass import stack, streams_pass
from plugins.mega_mhc.reference import HcMix
from plugins.registry import OPERATORS

# A part of a row's sums is so many channels of every stream.
PART_CHANNELS = 320
# Up to this many rows every tile of a row is a program of its own.
_SPREAD_ROWS = 256
_FINISH_WARPS = 4
_NORM_TILE = 1024
_STACK_TILE = 1024


class Launch(NamedTuple):
    """A program's rows, channels of a tile, tiles, warps and tiles under way. stacked: fn is cut
    into halves once beforehand, instead of by every program."""

    rows: int
    tile: int
    tiles: int
    warps: int
    stages: int
    stacked: bool


def launch(rows: int, *, wide: bool) -> Launch:
    """For so many rows; wide: of float32, whose products take twice the memory."""
    if wide:
        return Launch(32, 16, 20, 8, 1, False)
    if rows <= _SPREAD_ROWS:
        return Launch(16 if rows <= 16 else 32, 64, 1, 4, 1, False)
    return Launch(32, 64, 10, 8, 2, True)


def finish_rows(rows: int) -> int:
    """Rows of a program that finishes mixes: four warps have one of the fewest, else a warp has
    one."""
    return 1 if rows <= 3 else _FINISH_WARPS


class _Pass:
    """One pass over `streams` [T, S, D]: what is given is done."""

    def __init__(self, streams: torch.Tensor) -> None:
        self.streams = unit_stride(streams)
        self.rows, self.count, self.width = streams.shape
        self.launch = launch(self.rows, wide=streams.dtype == torch.float32)
        self.tiles = triton.cdiv(self.width, self.launch.tile)
        self.part = PART_CHANNELS // self.launch.tile
        self.parts = triton.cdiv(self.tiles, self.part)
        self.per_part = self.part if self.launch.tiles == 1 else 1
        self.mixes = self.count * (2 + self.count)
        self.num_sums = padded(self.mixes + 1)
        self.overlap = overlaps(streams.device)
        self.sums = streams

    def run(
        self,
        *,
        y: torch.Tensor | None = None,
        post: torch.Tensor | None = None,
        comb: torch.Tensor | None = None,
        fn: torch.Tensor | None = None,
        pre: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expanded streams [T, S, D] if y is given, and [T, D] collapsed by `pre` if that is."""
        s, size = self.streams, self.launch
        expanded, collapsed = s, s
        if y is not None:
            expanded = torch.empty_like(s, memory_format=torch.contiguous_format)
            y = unit_stride(y)
        if pre is not None:
            collapsed = s.new_empty((self.rows, self.width))
        places = self.parts * self.per_part
        wide = s.dtype == torch.float32 or INTERPRETED
        stacked = fn is not None and size.stacked and not wide
        mix_tile = max(64, 2 * padded(self.mixes))
        # The pass reads fn before the launch ahead of it has ended: not a copy made by that one.
        overlap = self.overlap and (fn is None or fn.is_contiguous())
        if fn is not None:
            self.sums = s.new_empty((self.rows, places, self.num_sums), dtype=torch.float32)
            fn = self._stacked(fn.contiguous(), mix_tile) if stacked else fn.contiguous()
        programs = places if size.tiles == 1 else triton.cdiv(self.tiles, size.tiles)
        streams_pass[(triton.cdiv(self.rows, size.rows), programs)](
            s, s.stride(0), s.stride(1), _given(y, s), y.stride(0) if y is not None else 0,
            _given(post, s), _given(comb, s), _given(pre, s), _given(fn, s), expanded, collapsed,
            self.sums, self.rows, self.tiles, self.width, self.count, self.mixes, self.num_sums,
            mix_tile, size.rows, size.tile, size.tiles, self.part, places,
            y is not None, fn is not None, pre is not None,
            tl.float32 if s.dtype == torch.float32 else tl.bfloat16, wide, stacked, overlap,
            num_warps=size.warps, num_stages=size.stages, launch_pdl=overlap,
        )  # fmt: skip
        return expanded, collapsed

    def run_hopper(
        self,
        y: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        pre: torch.Tensor,
        fn: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All of `run` by the kernel for Hopper."""
        s = self.streams
        expanded = torch.empty_like(s, memory_format=torch.contiguous_format)
        collapsed = s.new_empty((self.rows, self.width))
        self.sums = s.new_empty((self.rows, self.parts, self.num_sums), dtype=torch.float32)
        hopper.launch(s, y, post, comb, pre, fn, expanded, collapsed, self.sums)
        return expanded, collapsed

    def _stacked(self, fn: torch.Tensor, mix_tile: int) -> torch.Tensor:
        """fn's upper and lower bfloat16 halves as the pass takes them."""
        stacked = fn.new_empty((mix_tile, self.count * self.width), dtype=torch.bfloat16)
        length = self.count * self.width
        stack[(self.mixes, triton.cdiv(length, _STACK_TILE))](
            fn, stacked, length, _STACK_TILE, self.overlap, num_warps=4, launch_pdl=self.overlap
        )
        return stacked

    def finish(
        self,
        base: torch.Tensor,
        scale: torch.Tensor,
        collapsed: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        *,
        sinkhorn_iters: int,
        hc_eps: float,
        norm_eps: float,
    ) -> HcMix:
        """The mix of the sums that `run` left; `collapsed`, if given, is normalised in place."""
        s, rows = self.count, self.rows
        new = functools.partial(self.streams.new_empty, dtype=torch.float32)
        mix = HcMix(new((rows, s)), new((rows, s)), new((rows, s, s)))
        of_program = finish_rows(rows)
        programs = triton.cdiv(rows, of_program) + (rows if collapsed is not None else 0)
        finish[(programs,)](
            self.sums, base, scale, *mix, _given(collapsed, base), _given(norm, base), rows,
            sinkhorn_iters, hc_eps, norm_eps, self.width, s, self.num_sums, self.parts,
            self.per_part, of_program, collapsed is not None,
            self._norm_tile(), self.overlap, not INTERPRETED,
            num_warps=_FINISH_WARPS, launch_pdl=self.overlap, enable_fp_fusion=False,
        )  # fmt: skip
        return mix

    def normalise(self, collapsed: torch.Tensor, norm: torch.Tensor, norm_eps: float) -> None:
        """`collapsed` in place, bit for bit as `finish` does it."""
        normalise[(self.rows,)](
            collapsed, norm, norm_eps, self.width, self._norm_tile(), self.overlap,
            num_warps=_FINISH_WARPS, launch_pdl=self.overlap, enable_fp_fusion=False,
        )  # fmt: skip

    def _norm_tile(self) -> int:
        return min(_NORM_TILE, padded(self.width))


def _given(x: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """x, or a tensor that is not read."""
    return stand_in if x is None else x


def _knows(streams: torch.Tensor, *others: torch.Tensor) -> bool:
    return streams.shape[1] in (2, 4) and not needs_reference(streams, *others)


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> HcMix:
    """As the reference, which runs for float64, a gradient, or other than two or four streams.

    bfloat16 streams are multiplied by two bfloat16 halves of fn (16 bits of it), float32 ones in
    three TF32 products; sums are float32.
    """
    sizes: dict[str, Any] = {
        "sinkhorn_iters": sinkhorn_iters, "hc_eps": hc_eps, "norm_eps": norm_eps
    }  # fmt: skip
    if not streams.numel() or not _knows(streams, fn, base, scale):
        mix: HcMix = OPERATORS["hc_mix"].reference(streams, fn, base, scale, **sizes)
        return mix
    one = _Pass(streams)
    one.run(fn=fn)
    return one.finish(base, scale, **sizes)


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient."""
    if not streams.numel() or not _knows(streams, pre):
        reference: torch.Tensor = OPERATORS["hc_collapse"].reference(streams, pre)
        return reference
    return _Pass(streams).run(pre=pre.contiguous())[1]


def hc_expand(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient."""
    if not streams.numel() or not _knows(streams, y, post, comb):
        reference: torch.Tensor = OPERATORS["hc_expand"].reference(streams, y, post, comb)
        return reference
    return _Pass(streams).run(y=y, post=post.contiguous(), comb=comb.contiguous())[0]


def hc_advance(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    norm: torch.Tensor,
    *,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bit for bit what mega_mhc makes, without the mix."""
    if not streams.numel() or not _knows(streams, y, post, comb, pre, norm):
        reference: tuple[torch.Tensor, torch.Tensor] = OPERATORS["hc_advance"].reference(
            streams, y, post, comb, pre, norm, norm_eps=norm_eps
        )
        return reference
    one = _Pass(streams)
    expanded, collapsed = one.run(
        y=y, post=post.contiguous(), comb=comb.contiguous(), pre=pre.contiguous()
    )
    one.normalise(collapsed, norm, norm_eps)
    return expanded, collapsed


def mega_mhc(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, HcMix, torch.Tensor]:
    """As the pieces' kernels, bit for bit in the streams and the mix."""
    if not streams.numel() or not _knows(streams, y, post, comb, pre, fn, base, scale, norm):
        pieces: tuple[torch.Tensor, HcMix, torch.Tensor] = OPERATORS["mega_mhc"].reference(
            streams, y, post, comb, pre, fn, base, scale, norm,
            sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, norm_eps=norm_eps,
        )  # fmt: skip
        return pieces
    one = _Pass(streams)
    y = unit_stride(y)
    many = one.rows > _SPREAD_ROWS and fn.is_contiguous()
    for_hopper = many and hopper.takes(one.streams, y, one.parts)
    expanded, collapsed = (one.run_hopper if for_hopper else one.run)(
        y=y, post=post.contiguous(), comb=comb.contiguous(), pre=pre.contiguous(), fn=fn
    )
    mix = one.finish(
        base, scale, collapsed, norm,
        sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, norm_eps=norm_eps,
    )  # fmt: skip
    return expanded, mix, collapsed
