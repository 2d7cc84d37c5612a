"""Loading: the released quantised layout gives the numbers its bytes mean, bad input a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ragged import Timeline, make_batch, run_alone
from safetensors.torch import load_file

from engine.config import ConfigError, ModelConfig
from engine.contiguous_cache import ContiguousCache
from engine.network import Network, NetworkWeights, load_weights
from engine.safetensors_file import CheckpointError, TensorInfo
from plugins.formats.rows import PackedRows, RowStore

Golden = Callable[[bool], dict[str, torch.Tensor]]
Classes = npt.NDArray[np.int64]
Tensors = dict[str, tuple[str, torch.Tensor]]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_LINEARS = (
    "wq_a", "attn.wq_b", "attn.wkv", "wo_a", "wo_b", "indexer.wq_b", "engram.wkv", "main_proj",
    "shared_experts.w1", "shared_experts.w2", "shared_experts.w3",
)  # fmt: skip


class MemorySource:
    """Named tensors in memory, with the dtype names of a safetensors header."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def describe(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"expected a tensor {name}, found none")
        dtype, tensor = self._tensors[name]
        return TensorInfo(dtype, tuple(tensor.shape))

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name][1]


def power_of_two(amax: torch.Tensor, largest: float) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-6) / largest)))


def exponent_bytes(scale: torch.Tensor) -> torch.Tensor:
    return (torch.log2(scale) + 127).to(torch.uint8)


def fp8_blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    """E4M3 codes and E8M0 scales of rows × columns blocks, and the values that they mean."""
    blocks = torch.unflatten(torch.unflatten(weight, 0, (-1, rows)), 2, (-1, columns))
    scale = power_of_two(blocks.abs().amax((1, 3)), 448.0)
    full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    codes = (weight / full).to(torch.float8_e4m3fn)
    stored = {"weight": ("F8_E4M3", codes), "scale": ("F8_E8M0", exponent_bytes(scale))}
    return stored, codes.float() * full


def fp4_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Two E2M1 codes a byte, low nibble first, one E8M0 scale per 32 inputs."""
    scale = power_of_two(torch.unflatten(weight, 1, (-1, 32)).abs().amax(-1), 6.0)
    full = scale.repeat_interleave(32, 1)
    scaled = weight / full
    magnitude = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    code = magnitude + 8 * (scaled < 0)
    packed = (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8).view(torch.int8)
    stored = {"weight": ("I8", packed), "scale": ("F8_E8M0", exponent_bytes(scale))}
    return stored, E2M1[magnitude] * scaled.sign() * full


@pytest.fixture(scope="module")
def both_layouts(tiny_dir: str) -> tuple[MemorySource, MemorySource]:
    """TINY in the released layout, and the numbers that those bytes mean, unquantised."""
    released: Tensors = {}
    plain: Tensors = {}
    for name, weight in load_file(f"{tiny_dir}/model.safetensors").items():
        prefix = name.removesuffix(".weight")
        if prefix.endswith(FP8_LINEARS):
            stored, value = fp8_blocks(weight, 32, 32)
        elif ".ffn.experts." in prefix:
            stored, value = fp4_rows(weight)
        elif prefix.endswith("engram.embed"):
            stored, value = fp8_blocks(weight, 1, 32)
        else:
            released[name] = plain[name] = ("F32", weight)
            continue
        released |= {f"{prefix}.{part}": tensor for part, tensor in stored.items()}
        plain[name] = ("F32", value)
    return MemorySource(released), MemorySource(plain)


def leaves(weights: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(weights, tuple):
        for i, item in enumerate(weights):
            yield from leaves(item, f"{path}.{i}")
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from leaves(getattr(weights, field.name), f"{path}.{field.name}")
    else:
        yield path, weights


@pytest.fixture(scope="module")
def classes(golden_of: Golden) -> Classes:
    return golden_of(True)["token_class"].numpy()


def test_released_bytes_load_as_the_numbers_they_mean(
    tiny_config: ModelConfig,
    both_layouts: tuple[MemorySource, MemorySource],
    classes: Classes,
) -> None:
    released, plain = (
        load_weights(tiny_config, source, classes, torch.float64, activation_quant=False)
        for source in both_layouts
    )
    compared = 0
    for (path, got), (_, expected) in zip(leaves(released), leaves(plain), strict=True):
        if isinstance(got, torch.Tensor):
            assert isinstance(expected, torch.Tensor)
            assert torch.equal(got, expected), path
            compared += 1
        elif path.endswith(".table"):
            slots = torch.arange(660)
            assert isinstance(got, PackedRows)
            rows: RowStore = expected  # type: ignore[assignment]
            assert torch.equal(got.read(slots, torch.float64), rows.read(slots, torch.float64))
        else:
            assert got == expected, path
    assert compared > 300


def test_inputs_are_rounded_exactly_where_the_release_quantised_the_weight(
    tiny_config: ModelConfig,
    both_layouts: tuple[MemorySource, MemorySource],
    classes: Classes,
) -> None:
    def flags(weights: NetworkWeights) -> dict[str, object]:
        return {p: v for p, v in leaves(weights) if p.endswith("quantized_input")}

    released = flags(load_weights(tiny_config, both_layouts[0], classes, torch.float32))
    rounded = {path for path, value in released.items() if value}
    for path in released:
        part = path.rsplit(".", 2)[1]
        expected = part in {"wq_a", "wq_b", "wkv", "wo_b", "main_proj", "routed", "shared"}
        # The compressor's projections are released unquantised.
        expected = expected and ".compressor." not in path
        assert (path in rounded) == expected, path
    assert not any(
        flags(load_weights(tiny_config, both_layouts[1], classes, torch.float32)).values()
    )


def test_input_rounding_changes_the_result_and_the_diagnostic_turns_it_off(
    tiny_config: ModelConfig,
    both_layouts: tuple[MemorySource, MemorySource],
    classes: Classes,
) -> None:
    def logits(source: MemorySource, activation_quant: bool) -> torch.Tensor:
        weights = load_weights(
            tiny_config, source, classes, torch.float64, activation_quant=activation_quant
        )
        request = Timeline([5, 17, 300, 300, 2, 499])
        run_alone(Network(tiny_config, weights), request, quantize=False)
        return request.rows(0, 6)

    released, plain = both_layouts
    assert torch.equal(logits(released, False), logits(plain, True))
    assert (logits(released, True) - logits(plain, True)).abs().max() > 1e-3


def test_narrow_dtypes_keep_wide_parts_wide(network_of: Callable[[torch.dtype], Network]) -> None:
    weights = network_of(torch.bfloat16).weights
    assert weights.embed.dtype == torch.bfloat16
    assert weights.head.value.dtype == torch.float32
    pair, single = weights.layers[2].attention.compressor, weights.layers[6].attention.compressor
    assert pair is not None
    assert single is not None
    assert pair.wkv.value.dtype == torch.float32
    assert single.wkv.value.dtype == torch.bfloat16
    assert weights.layers[0].attn_hc.fn.dtype == torch.float32
    assert weights.layers[0].moe.gate.dtype == torch.float32
    assert weights.draft is not None
    assert weights.draft.markov_embed.dtype == torch.bfloat16
    assert weights.draft.markov_head.value.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:-1], r"expected one class for each of 512 token ids, got shape \[511\]"),
        (lambda c: c + 1, "expected classes 0 … 255, got 1 … 256"),
        (lambda c: c - 1, "expected classes 0 … 255, got -1 … 254"),
    ],
)
def test_wrong_token_classes_are_refused(
    tiny_config: ModelConfig,
    both_layouts: tuple[MemorySource, MemorySource],
    classes: Classes,
    change: Callable[[Classes], Classes],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_weights(tiny_config, both_layouts[1], change(classes), torch.float32)


def test_a_missing_tensor_is_named(
    tiny_config: ModelConfig,
    both_layouts: tuple[MemorySource, MemorySource],
    classes: Classes,
) -> None:
    plain = both_layouts[1]
    names = {name: (plain.describe(name).dtype, plain.read(name)) for name in plain.names()}
    del names["layers.4.attn.compressor.wgate.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.4\.attn\.compressor\.wgate\.weight"):
        load_weights(tiny_config, MemorySource(names), classes, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engram_num_embeddings": (660, 865)}, r"expected \[660, 864\]"),
        ({"engram_layer_ids": (1, 9)}, "expected layers up to 6"),
    ],
)
def test_engram_tables_that_do_not_fit_the_hash_are_refused(
    network64: Network, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Network(network64.config.with_changes(**changes), network64.weights)


@pytest.fixture
def trained(
    tiny_config: ModelConfig,
    both_layouts: tuple[MemorySource, MemorySource],
    classes: Classes,
) -> tuple[Network, dict[str, torch.Tensor]]:
    """A float64 network whose weights are leaves, and those leaves by path."""
    weights = load_weights(tiny_config, both_layouts[1], classes, torch.float64)
    leaf_of = {
        path: leaf.requires_grad_()
        for path, leaf in leaves(weights)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
    return Network(tiny_config, weights), leaf_of


def training_loss(network: Network, *, quantize: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (48,), generator=generator).tolist()
    cache = ContiguousCache(network.config, 1, 48, torch.float64, quantize=quantize)
    batch = make_batch(network.config, [Timeline(tokens)], [48])
    return network.forward(batch, cache).logits.square().mean()


def test_every_weight_that_acts_on_logits_gets_a_gradient(
    trained: tuple[Network, dict[str, torch.Tensor]],
) -> None:
    """Training runs this very network, cache rounding included (straight through)."""
    network, leaf_of = trained
    torch.autograd.backward(training_loss(network, quantize=True))
    missing = {path for path, leaf in leaf_of.items() if leaf.grad is None or not leaf.grad.any()}
    # Indexers and biases only choose; the draft has a loss of its own.
    choosers = (".indexer.", ".index_", ".moe.bias")
    unused = {p for p in leaf_of if p.startswith(".draft") or any(c in p for c in choosers)}
    assert missing == unused


def test_gradient_through_the_cache_is_the_derivative(
    trained: tuple[Network, dict[str, torch.Tensor]],
) -> None:
    """Along one random direction of all weights at once, against a central difference."""
    network, leaf_of = trained
    torch.autograd.backward(training_loss(network, quantize=False))
    generator = torch.Generator().manual_seed(1)
    directions = {
        path: torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        * leaf.detach().abs().mean()
        for path, leaf in leaf_of.items()
    }
    slope = sum(
        float((leaf.grad * directions[path]).sum())
        for path, leaf in leaf_of.items()
        if leaf.grad is not None
    )
    step_size = 1e-7

    @torch.no_grad()
    def loss_at(offset: float) -> float:
        for path, leaf in leaf_of.items():
            leaf += offset * directions[path]
        return float(training_loss(network, quantize=False))

    above = loss_at(step_size)
    below = loss_at(-2 * step_size)
    assert (above - below) / (2 * step_size) == pytest.approx(slope, rel=1e-5)
