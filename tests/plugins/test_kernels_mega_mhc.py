"""The hyper-connection kernels against float64, piece by piece and in one pass."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.mega_mhc.cases import ATTRIBUTES, CASES, MhcCase

kernel = load_kernel("mega_mhc")

DTYPES = (torch.float32, torch.bfloat16)
# Each is a few programs of 64 rows; the others differ in rows only.
SOME = [case for case in CASES if case.rows < 10 and case.width < 100]
# The interpreter cuts float32 down to bfloat16 instead of rounding.
STREAMS = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8}


def mix_of(x: torch.Tensor, operands: dict) -> list[torch.Tensor]:
    """pre, post and comb of streams x [T, S, D] in float64, from the formulas."""
    rows, S, _ = x.shape
    flat = x.double().flatten(1)
    fn, base, scale = (operands[name].double() for name in ("fn", "base", "scale"))
    z = flat @ fn.T / (flat.square().mean(1, keepdim=True) + 1e-20).sqrt()
    pre = torch.sigmoid(z[:, :S] * scale[0] + base[:S]) + 1e-6
    post = 2 * torch.sigmoid(z[:, S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = (z[:, 2 * S :] * scale[2] + base[2 * S :]).view(rows, S, S).softmax(-1) + 1e-6
    for step in range(20):
        if step:
            comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    return [pre, post, comb]


def close(ours: Iterable, expected: Iterable, tolerance: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        scale = max(1e-30, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.cpu().double() / scale, b / scale, rtol=0, atol=tolerance)


def mix_tolerance(case: MhcCase, dtype: torch.dtype) -> float:
    return (2e-5 if dtype == torch.float32 else 5e-5) * max(1.0, case.logit_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_pieces(case: MhcCase, dtype: torch.dtype) -> None:
    operands, y = case.operands(dtype), case.output(dtype)
    x = operands["streams"].double()
    pre, post, comb = expected = mix_of(x, operands)
    close(kernel.hc_mix(**moved(operands), **ATTRIBUTES), expected, mix_tolerance(case, dtype))
    streams = moved(operands)["streams"]
    narrow = moved({"pre": pre.float(), "post": post.float(), "comb": comb.float(), "y": y})
    ours = kernel.hc_collapse(streams, narrow["pre"])
    assert ours.dtype == dtype
    close([ours], [(pre[:, :, None] * x).sum(1)], STREAMS[dtype])
    ours = kernel.hc_expand(streams, narrow["y"], narrow["post"], narrow["comb"])
    assert ours.dtype == dtype
    mixed = torch.einsum("tij,tid->tjd", comb, x) + post[:, :, None] * y.double()[:, None]
    close([ours], [mixed], STREAMS[dtype])


@pytest.mark.parametrize(
    ("rows", "dtype"), [(66, torch.float32), (3, torch.bfloat16), (18, torch.bfloat16)]
)
def test_one_pass_equals_the_pieces(rows: int, dtype: torch.dtype) -> None:
    """From the streams that it wrote itself; the width is no multiple of a tile."""
    case = MhcCase("pass", rows, 4, 70)
    operands = moved(case.operands(dtype))
    streams, y = operands.pop("streams"), case.output(dtype).to(DEVICE)
    draw = torch.Generator().manual_seed(5)
    post, pre = torch.rand(2, rows, 4, generator=draw).to(DEVICE).unbind(0)
    comb = torch.rand(rows, 4, 4, generator=draw).to(DEVICE)
    norm = torch.rand(70, generator=draw).to(dtype).to(DEVICE)
    expanded, mix, u = kernel.mega_mhc(
        streams, y, post, comb, pre, **operands, norm=norm, **ATTRIBUTES
    )
    assert torch.equal(expanded, kernel.hc_expand(streams, y, post, comb))
    without = kernel.hc_advance(streams, y, post, comb, pre, norm, norm_eps=1e-20)
    for one, other in zip(without, (expanded, u), strict=True):
        assert torch.equal(one, other)
    for one, alone in zip(mix, kernel.hc_mix(expanded, **operands, **ATTRIBUTES), strict=True):
        assert torch.equal(one, alone)
    collapsed = kernel.hc_collapse(expanded, pre).double()
    expected = collapsed / collapsed.square().mean(1, keepdim=True).sqrt() * norm.double()
    close([u], [expected.cpu()], STREAMS[dtype])
    on_cpu = {name: x.cpu() for name, x in operands.items()}
    close(mix, mix_of(expanded.cpu(), on_cpu), mix_tolerance(case, dtype))


def test_many_rows_are_each_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that programs take in turn, the last ones in a block that is not full; on Hopper the
    other kernel's. The interpreter multiplies other shapes in another order."""
    monkeypatch.setattr(kernel, "_SPREAD_ROWS", 32)
    count, width = (70, 640) if DEVICE == "cpu" else (600, 5120)
    case = MhcCase("many", count, 4, width)
    operands = moved(case.operands(torch.bfloat16))
    draw = torch.Generator().manual_seed(6)
    rows = {
        "streams": operands.pop("streams"),
        "y": case.output(torch.bfloat16).to(DEVICE),
        "post": torch.rand(count, 4, generator=draw).to(DEVICE),
        "comb": torch.rand(count, 4, 4, generator=draw).to(DEVICE),
        "pre": torch.rand(count, 4, generator=draw).to(DEVICE),
    }
    rest = {**operands, "norm": torch.rand(width, generator=draw).bfloat16().to(DEVICE)}
    expanded, mix, u = kernel.mega_mhc(**rows, **rest, **ATTRIBUTES)
    on_cpu = {name: x.cpu() for name, x in operands.items()}
    close(mix, mix_of(expanded.cpu(), on_cpu), mix_tolerance(case, torch.bfloat16))
    for few in (20,) if DEVICE == "cpu" else (20, 3, 1):
        some = {name: x[-few:] for name, x in rows.items()}
        alone = kernel.mega_mhc(**some, **rest, **ATTRIBUTES)
        for x, y in zip((expanded, *mix, u), (alone[0], *alone[1], alone[2]), strict=True):
            assert torch.equal(x[-few:], y)


def test_a_row_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on whether the parts of its sums are programs of their own."""
    case = MhcCase("batch", 17, 4, 700)
    operands = moved(case.operands(torch.bfloat16))
    whole = kernel.hc_mix(**operands, **ATTRIBUTES)
    part = {**operands, "streams": operands["streams"][4:5]}
    monkeypatch.setattr(kernel, "_SPREAD_ROWS", 0)
    for one, other in zip(kernel.hc_mix(**part, **ATTRIBUTES), whole, strict=True):
        assert torch.equal(one, other[4:5])


def test_a_poisoned_row_poisons_no_other() -> None:
    case = MhcCase("poison", 3, 4, 40)
    operands = moved(case.operands(torch.bfloat16))
    whole = kernel.hc_mix(**operands, **ATTRIBUTES)
    operands["streams"][1, 2, 3] = torch.nan
    for one, other in zip(kernel.hc_mix(**operands, **ATTRIBUTES), whole, strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
        assert one[1].isnan().all()


def test_three_streams_and_float64_run_the_reference() -> None:
    for case, dtype in ((MhcCase("three", 2, 3, 32), torch.float32), (SOME[0], torch.float64)):
        operands = case.operands(dtype)
        expected = mix_of(operands["streams"].double(), operands)
        close(kernel.hc_mix(**moved(operands), **ATTRIBUTES), expected, 2e-5)
