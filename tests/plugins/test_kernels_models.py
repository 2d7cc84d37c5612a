"""Operators at the sizes of TINY, TinyFlash and the released model, against float64. Attention,
index scores, the gate, norms and Engram rows have theirs beside their other cases. What would take
the interpreter long runs on a GPU only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_oracle import QUANTIZERS, in_float64, relative
from kernel_oracle import DEVICE, load_kernel, moved
from test_kernels_linear import compare, seen, share_of
from test_kernels_mega_mhc import close, mix_of, mix_tolerance
from test_kernels_sample import check, mixed

from plugins.compressor.cases import PoolCase
from plugins.linear import PackedFormat, PackedLinearWeight, PackedMatrix
from plugins.linear.cases import PackedCase
from plugins.markov.cases import MarkovCase
from plugins.mega_mhc.cases import ATTRIBUTES, MhcCase
from plugins.moe import PackedExpertWeights
from plugins.wo_a.cases import WoACase

FP8, FP4, NVFP4 = PackedFormat.FP8_BLOCKS, PackedFormat.FP4_ROWS, PackedFormat.NVFP4
HALF = torch.bfloat16


def native(*values: object) -> object:
    """Parameters for a GPU only."""
    slow = pytest.mark.skipif(DEVICE == "cpu", reason="takes long where it is interpreted")
    return pytest.param(*values, marks=[pytest.mark.gpu, slow])


@pytest.mark.parametrize(
    "case",
    [
        PackedCase("TINY, wq_a", 3, 128, 64, FP8),
        PackedCase("TINY, wq_b", 5, 64, 256, FP8),
        PackedCase("TinyFlash, wkv", 3, 256, 128, FP8),
        PackedCase("TinyFlash, Engram's wkv", 20, 192, 1280, FP8),
        PackedCase("released, wkv", 2, 5120, 512, FP8),
        native(PackedCase("released, wq_a", 1, 5120, 1280, FP8)),
        native(PackedCase("released, wq_a, many rows", 70, 5120, 1280, PackedFormat.MXFP8)),
        native(PackedCase("released, wq_b", 6, 1280, 32_768, FP8)),
        native(PackedCase("released, wq_b, more rows", 40, 1280, 32_768, FP8)),
        native(PackedCase("released, wo_b", 1, 8192, 5120, FP8)),
        native(PackedCase("released, wo_b, NVFP4", 17, 8192, 5120, NVFP4)),
        native(PackedCase("released, wo_b, as many as the library takes", 520, 8192, 5120, FP8)),
        native(PackedCase("released, Engram's wkv", 3, 6144, 25_600, FP8)),
    ],
    ids=lambda case: case.name,
)
def test_linear(case: PackedCase) -> None:
    operands = case.operands(HALF)
    ours = load_kernel("linear").linear(**moved(operands))
    weight = operands["weight"]
    compare(ours, seen(operands["x"], weight), exact(weight), HALF, share_of(case.stored))


def exact(weight: PackedLinearWeight) -> torch.Tensor:
    """Of NVFP4 in planes the global scale multiplies sums, not values that bfloat16 would round."""
    return replace(weight.packed, dtype=torch.float32).dequantize()


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(128, (64, 64)), (256, (128, 128)), native(5120, (1280, 512))],
    ids=["TINY", "TinyFlash", "released"],
)
@pytest.mark.parametrize("rows", [1, 6])
def test_linear_pair(inputs: int, outputs: tuple[int, int], rows: int) -> None:
    first, other = (PackedCase("", rows, inputs, n, FP8).operands(HALF, n) for n in outputs)
    weights = first["weight"], other["weight"]
    x = {"x": first["x"], "first": weights[0], "second": weights[1]}
    both = load_kernel("linear").linear_pair(*moved(x).values())
    for ours, weight in zip(both, weights, strict=True):
        compare(ours, seen(first["x"], weight), weight.value, HALF, share_of(FP8))


@pytest.mark.parametrize(
    "case",
    [
        WoACase("TINY", 5, 4, 64, 2, 32, stored=FP8),
        WoACase("TinyFlash", 5, 8, 128, 2, 64, stored=FP8, strided=True),
        native(WoACase("released, one row", 1, 64, 512, 8, 1024, stored=FP8)),
        native(WoACase("released, six rows", 6, 64, 512, 8, 1024, stored=FP8)),
        native(WoACase("released, strided", 40, 64, 512, 8, 1024, strided=True, stored=FP8)),
        native(WoACase("released, many rows", 100, 64, 512, 8, 1024, stored=NVFP4)),
    ],
    ids=lambda case: case.name,
)
def test_wo_a(case: WoACase) -> None:
    operands = case.operands(HALF)
    ours = load_kernel("wo_a").wo_a(**moved(operands)).unflatten(1, (case.groups, case.rank))
    weight, joined = operands["weight"], operands["o"].flatten(1)
    x = seen(joined, weight).unflatten(1, (case.groups, -1))
    values = exact(weight).unflatten(0, (case.groups, case.rank))
    for group in range(case.groups):
        compare(ours[:, group], x[:, group], values[group], HALF, share_of(case.stored))


def stack(count: int, width: int, inter: int, name: str) -> PackedExpertWeights:
    """Drawn and rounded where the kernels run: released sizes are many."""
    draw = torch.Generator(DEVICE).manual_seed(inter)

    def matrices(rows: int, columns: int) -> list[PackedMatrix]:
        made = []
        for _ in range(count):
            values = torch.randn(rows, columns, generator=draw, device=DEVICE) * columns**-0.5
            codes, scale = QUANTIZERS[name](values)
            kept = PackedFormat(name), (rows, columns), codes, scale, None, HALF
            made.append(PackedMatrix(*kept))
        return made

    w1, w3, w2 = matrices(inter, width), matrices(inter, width), matrices(width, inter)
    return PackedExpertWeights(w1, w3, w2, HALF, quantized_input=True)


@pytest.mark.parametrize(
    ("rows", "width", "inter", "count", "top_k"),
    [
        (3, 128, 64, 8, 2),
        (3, 256, 96, 8, 2),
        native(1, 5120, 2304, 7, 6),
        native(8, 5120, 2304, 7, 6),
        native(40, 5120, 2304, 7, 6),
        native(200, 5120, 2304, 3, 2),
    ],
    ids=["TINY", "TinyFlash", "released, one", "released, few", "released", "released, many"],
)
def test_moe(rows: int, width: int, inter: int, count: int, top_k: int) -> None:
    """Rows, ids and weights are parts of wider tensors. Of many tokens some are compared."""
    draw = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, count, generator=draw).argsort(1)
    given = {
        "u": torch.randn(rows, width + 16, generator=draw).to(HALF),
        "ids": torch.cat([ids[:, :top_k], ids], 1),
        "weights": torch.rand(rows, 2 * top_k, generator=draw),
    }
    given = {name: x.to(DEVICE) for name, x in given.items()}
    operands = {
        "u": given["u"][:, :width],
        "ids": given["ids"][:, :top_k],
        "weights": given["weights"][:, ::2],
        "routed": stack(count, width, inter, "fp4"),
        "shared": stack(1, width, inter, "fp8"),
        "swiglu_limit": 10.0,
    }
    ours = load_kernel("moe").moe(**operands)
    some = slice(0, rows, max(1, rows // 4))
    kept = {name: operands[name][some] for name in ("u", "ids", "weights")}
    assert relative(ours[some], in_float64(operands | kept)) < 3e-2
    whole = {name: operands[name].contiguous() for name in kept}
    assert torch.equal(ours, load_kernel("moe").moe(**operands | whole))


@pytest.mark.parametrize(
    "case",
    [
        MhcCase("TINY", 3, 4, 128),
        MhcCase("TinyFlash", 3, 4, 256),
        MhcCase("released", 1, 4, 5120),
        native(MhcCase("released, rows of a batch", 64, 4, 5120)),
        native(MhcCase("released, prefill", 520, 4, 5120)),
    ],
    ids=lambda case: case.name,
)
def test_hyper_connections(case: MhcCase) -> None:
    """Expanded, mixed, collapsed and normalised in one pass."""
    operands, y = case.operands(HALF), case.output(HALF)
    draw = torch.Generator().manual_seed(7)
    given = {
        "post": torch.rand(case.rows, 4, generator=draw),
        "comb": torch.rand(case.rows, 4, 4, generator=draw) / 4,
        "pre": torch.rand(case.rows, 4, generator=draw),
        "norm": torch.rand(case.width, generator=draw).to(HALF),
    }
    all_of_them = moved({**operands, "y": y, **given})
    ours, mix, u = load_kernel("mega_mhc").mega_mhc(
        *(all_of_them[name] for name in ("streams", "y", "post", "comb", "pre")),
        *(all_of_them[name] for name in ("fn", "base", "scale", "norm")),
        **ATTRIBUTES,
    )
    x = operands["streams"].double()
    expanded = torch.einsum("tij,tid->tjd", given["comb"].double(), x)
    expanded += given["post"].double()[:, :, None] * y.double()[:, None]
    rounding = 2.0 ** (-7 if DEVICE == "cpu" else -8)
    close([ours], [expanded], rounding)
    streams = ours.cpu()  # what the rest is made of
    close(mix, mix_of(streams, operands), mix_tolerance(case, HALF))
    collapsed = (given["pre"].double()[:, :, None] * streams.double()).sum(1)
    normed = collapsed / (collapsed.square().mean(1, keepdim=True) + 1e-20).sqrt()
    close([u], [normed * given["norm"].double()], 2 * rounding)


@pytest.mark.parametrize("vocab", [512, 4096], ids=["TINY", "TinyFlash"])
def test_sampling(vocab: int) -> None:
    """The released vocabulary stands in test_kernels_sample.py."""
    operands = mixed(4, vocab, vocab)
    check(operands, load_kernel("sample").sample(**moved(operands)))


@pytest.mark.parametrize("width", [32, 64, 128, 512])
def test_pooling(width: int) -> None:
    """Of entries and of index keys."""
    operands = PoolCase("", 2, width).operands(HALF)
    a, b = operands["a"].double(), operands["b"].double()
    weight = (b[:, 0] - b[:, 1]).sigmoid()
    ours = load_kernel("compressor").pool_pairs(**moved(operands)).cpu().double()
    torch.testing.assert_close(
        ours, weight * a[:, 0] + (1 - weight) * a[:, 1], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("vocab", "rank"),
    [(512, 16), (4096, 32), native(129_280, 256)],
    ids=["TINY", "TinyFlash", "released"],
)
def test_choice_of_drafts(vocab: int, rank: int) -> None:
    operands = MarkovCase("", 2, vocab, rank).operands(HALF)
    tokens, rows = load_kernel("markov").markov_choice(**moved(operands))
    expected = (operands["base"] + operands["correction"]).argmax(1)
    assert torch.equal(tokens.cpu(), expected)
    assert torch.equal(rows.cpu(), operands["embed"][expected])
