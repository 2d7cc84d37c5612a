"""Training's device kernels against the operators' references: values and gradients.

They run on a CUDA device, or on a CPU in the Triton language's interpreter (TRITON_INTERPRET=1);
skipped where there is neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.network.network import Network  # noqa: F401  registers the operators
from plugins.formats.records import RecordLayout, index_record, main_record, window_record
from plugins.formats.rows import ValueRows
from plugins.linear import LinearWeight
from plugins.moe import ExpertWeights
from plugins.registry import OPERATORS

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device and no interpreter", allow_module_level=True)

from examples.tinyflash.training import compiled
from examples.tinyflash.training.rows import FUSED_ROUNDING
from examples.tinyflash.training.selection import FUSED_SCORES, Span, index_scores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 37


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """The kernels, for this module only."""
    compiled.install()
    yield
    FUSED_ROUNDING.clear()
    for entry in OPERATORS.values():
        entry.__dict__.pop("kernel", None)


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(*shape, generator=generator) * std
    return values.to(DEVICE).requires_grad_()


def slots(count: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(-1, count, (ROWS, width), generator=generator).to(DEVICE)


def experts(count: int, quantized: bool) -> ExpertWeights:
    shapes = ((count, 32, 64), (count, 32, 64), (count, 64, 32))
    w1, w3, w2 = (normal(*shape, std=0.2) for shape in shapes)
    return ExpertWeights(w1, w3, w2, quantized)


def rope(dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(ROWS, device=DEVICE) * 211
    frequency = 10000.0 ** -(torch.arange(dims // 2, dtype=torch.float64) / dims * 2)
    return positions, frequency.to(DEVICE)


def attention(main_width: int) -> tuple[Any, ...]:
    main = (None, None)
    if main_width:
        main = (ValueRows(normal(41, 128)), slots(41, main_width))  # type: ignore[assignment]
    window = (ValueRows(normal(30, 128)), slots(30, 16))
    return (normal(ROWS, 8, 128), *rope(16), *window, *main, normal(8))


def cases() -> list[Any]:
    size, width = 4, 64
    streams = normal(ROWS, size, width)
    mix = (normal(24, size * width, std=0.1), normal(24), normal(3))
    ids = torch.argsort(normal(ROWS, 8).detach(), dim=1)[:, :2]
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("hc_mix", (streams, *mix), {"sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}),
        ("hc_collapse", (streams, normal(ROWS, size)), {}),
        (
            "hc_expand",
            (streams, normal(ROWS, width), normal(ROWS, size), normal(ROWS, size, size)),
            {},
        ),
        ("norm", (normal(ROWS, width), normal(width), 1e-20), {}),
        ("rope", (normal(ROWS, 8, 128), *rope(16)), {}),
        ("rope", (normal(ROWS, 64), *rope(16)), {"inverse": True}),
        (
            "mega_gate",
            (normal(ROWS, width), normal(8, width), normal(8).detach(), None, None),
            {"top_k": 2, "route_scale": 1.5, "gate_temp": 1.0},
        ),
        (
            "engram_gate",
            (streams, normal(ROWS, size, width), normal(ROWS, width), normal(size, width),
             normal(size, width, std=0.5), None),
            {"norm_eps": 1e-20},
        ),
    ]  # fmt: skip
    for quantized in (False, True):
        weight = LinearWeight(normal(32, width), quantized)
        cases.append(("linear", (normal(ROWS, width), weight), {}))
        moe = (normal(ROWS, width), ids, normal(ROWS, 2), experts(8, quantized),
               experts(1, quantized))  # fmt: skip
        cases.append(("moe", moe, {"swiglu_limit": 1.0}))
    cases += [("mega_attention", attention(n), {"scale": 0.1}) for n in (0, 5, 16, 70)]
    return [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(cases)]


def leaves_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, LinearWeight):
        return leaves_of(value.value)
    if isinstance(value, ExpertWeights):
        return [value.w1, value.w3, value.w2]
    return leaves_of(value.values) if isinstance(value, ValueRows) else []


@pytest.mark.parametrize(("name", "arguments", "options"), cases())
def test_kernel_equals_reference(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    entry, leaves = OPERATORS[name], [leaf for a in arguments for leaf in leaves_of(a)]
    results, gradients = [], []
    for implementation in (entry.reference, entry.kernel):
        assert implementation is not None
        made = implementation(*arguments, **options)
        made = [made] if isinstance(made, torch.Tensor) else list(made)
        total = sum(
            (one * torch.linspace(-1, 1, one.numel(), device=DEVICE).view_as(one)).sum()
            for one in made
            if one.requires_grad
        )
        assert isinstance(total, torch.Tensor)
        results.append(made)
        gradients.append(torch.autograd.grad(total, leaves))
    # TF32 products on a device, float32 in the interpreter.
    tolerance = 5e-3 if DEVICE == "cuda" else 1e-5
    for expected, got in (*zip(*results, strict=True), *zip(*gradients, strict=True)):
        scale = float(expected.detach().double().abs().max()) + 1e-30
        assert float((expected.double() - got.double()).abs().max()) < tolerance * scale


@pytest.mark.parametrize("layout", [window_record(128), main_record(128), index_record(64)])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 50.0, 1e4])
def test_rounding_gives_the_records_values(layout: RecordLayout, scale: float) -> None:
    values = normal(500, layout.width, std=scale).detach()
    assert torch.equal(FUSED_ROUNDING[layout.name](values), layout.round(values))


def test_index_scores_equal_the_reference() -> None:
    """Conversations of 5, 90 and 30 rows, ratio 1, of which the first 2 rows each are left out;
    values that bfloat16 holds exactly."""
    lengths, heads, width = (5, 90, 30), 8, 64
    first = torch.cat([torch.full((n - 2,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    visible = torch.cat([torch.arange(3, n + 1) for n in lengths])
    span = Span(first.to(DEVICE), visible.to(DEVICE), 90)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(-6, 7, (len(first), heads, width), generator=generator)
    keys = torch.randint(-6, 7, (sum(lengths), width), generator=generator)
    arguments = (queries.float().to(DEVICE), normal(len(first), heads).detach(),
                 keys.float().to(DEVICE), span)  # fmt: skip
    expected, got = index_scores(*arguments), FUSED_SCORES[0](*arguments)
    assert torch.equal(expected == -torch.inf, got == -torch.inf)
    finite = expected > -torch.inf
    assert (expected[finite] - got[finite]).abs().max() < 1e-4 * expected[finite].abs().max()
