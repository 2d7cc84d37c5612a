"""The trained tensors: leaves of a NetworkWeights tree, and their released names.

A step runs on a copy of the tree in which every leaf has been rounded as the released layout will
store it (straight-through gradient), so that the exported checkpoint is the network that was
trained.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from builder.layout import Storage, all_weights
from engine.config import ModelConfig
from engine.network.weights import NetworkWeights
from examples.tinyflash.training.rows import DirectRows
from plugins.formats.released import (
    dequantize_fp4_rows,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
    quantize_fp4_rows,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)
from plugins.formats.rows import ValueRows

T = TypeVar("T")
Leaf = Callable[[str, torch.Tensor], torch.Tensor]

# Path in the tree → released name, applied in order.
_RENAMES = (
    (r"\.value$", ".weight"),
    (r"^draft\.stages\.", "mtp."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.attention\.compressor\.index_wk\.", ".attn.indexer.wk."),
    (r"\.attention\.compressor\.index_norm$", ".attn.indexer.k_norm"),
    (r"\.attention\.sink$", ".attn.attn_sink"),
    (r"\.attention\.", ".attn."),
    (r"\.moe\.gate$", ".ffn.gate.weight"),
    (r"\.moe\.bias$", ".ffn.gate.bias"),
    (r"\.moe\.bias_image$", ".ffn.gate.bias_vl"),
    (r"\.moe\.routed\.(w[123])$", r".ffn.experts.{expert}.\1.weight"),
    (r"\.moe\.shared\.(w[123])$", r".ffn.shared_experts.\1.weight"),
    (r"\.engram\.table$", ".engram.embed"),
    (r"^draft\.(main_proj|main_norm)", r"mtp.0.\1"),
    (r"^draft\.markov_embed$", "mtp.{last}.markov_head.embed"),
    (r"^draft\.markov_head\.", "mtp.{last}.markov_head.head."),
    (r"^draft\.confidence\.", "mtp.{last}.confidence_head.proj."),
    (r"^draft\.norm$", "mtp.{last}.norm"),
    (r"(norm|embed|^embed)$", r"\1.weight"),
)


def released_name(path: str, config: ModelConfig) -> str:
    """The released name of a leaf; routed experts keep `{expert}` for their stacked dimension."""
    name = path
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name.replace("{last}", str(config.num_nextn_predict_layers - 1))


def map_tree(tree: T, leaf: Leaf, path: str = "") -> T:
    """`tree` with every float tensor replaced by leaf(path, tensor); Engram tables included."""
    result: Any = tree
    if isinstance(tree, torch.Tensor):
        result = leaf(path, tree) if tree.is_floating_point() else tree
    elif isinstance(tree, ValueRows | DirectRows):
        result = DirectRows(leaf(path, tree.values))
    elif isinstance(tree, tuple):
        result = tuple(map_tree(one, leaf, _join(path, i)) for i, one in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            field.name: map_tree(getattr(tree, field.name), leaf, _join(path, field.name))
            for field in dataclasses.fields(tree)
        }
        result = dataclasses.replace(tree, **changes)
    return cast(T, result)


def _join(path: str, part: str | int) -> str:
    return f"{path}.{part}" if path else str(part)


class Parameters:
    """The leaves by path, float32 with gradients, on one device."""

    def __init__(self, config: ModelConfig, weights: NetworkWeights, device: str) -> None:
        self.config = config
        self.leaves: dict[str, torch.Tensor] = {}

        def own(path: str, tensor: torch.Tensor) -> torch.Tensor:
            leaf = tensor.detach().to(device, torch.float32).clone().requires_grad_()
            self.leaves[path] = leaf
            return leaf

        classes = weights.token_class.to(device)
        self._tree = dataclasses.replace(map_tree(weights, own), token_class=classes)
        storage = {spec.name: spec.storage for spec in all_weights(config)}
        self._storage: dict[str, Storage] = {
            path: storage[released_name(path, config).replace("{expert}", "0")]
            for path in self.leaves
        }
        # What rounding adds to each leaf; empty until first computed.
        self.rounding: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def restore(self, leaves: dict[str, torch.Tensor]) -> None:
        """Take over the values of all leaves, by path. Raises ValueError when some are missing, too
        many, or of another shape."""
        shapes = [{p: tuple(t.shape) for p, t in those.items()} for those in (self.leaves, leaves)]
        other = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
        if other:
            path = other[0][0]
            wanted, got = (shape.get(path, "none") for shape in shapes)
            raise ValueError(
                f"expected {path} of shape {wanted}, got {got}; it is of another model"
            )
        for path, value in leaves.items():
            self.leaves[path].copy_(value)

    def refresh_rounding(self) -> None:
        """Compute anew, in place, what rounding adds to each leaf. Every few steps is enough."""
        with torch.no_grad():
            for path, leaf in self.leaves.items():
                if self._storage[path] != "f32":
                    added = released_values(leaf, self._storage[path]) - leaf
                    self.rounding.setdefault(path, torch.empty_like(leaf)).copy_(added)

    def weights(self, *, quantized: bool) -> NetworkWeights:
        """The tree to run: the leaves, or the leaves as the released layout stores them.

        The latter needs `refresh_rounding` before.
        """
        if not quantized:
            return self._tree
        added = torch._foreach_add(
            [self.leaves[path] for path in self.rounding], list(self.rounding.values())
        )
        rounded = dict(zip(self.rounding, added, strict=True))
        tree = map_tree(self._tree, lambda path, leaf: rounded.get(path, leaf))
        return cast(NetworkWeights, _with_quantized_inputs(tree, self._storage))

    def named_released(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under its released name, float32 on the CPU, experts one by one."""
        for path, leaf in self.leaves.items():
            name, value = released_name(path, self.config), leaf.detach().float().cpu()
            if "{expert}" in name:
                for expert, one in enumerate(value):
                    yield name.replace("{expert}", str(expert)), one
            elif ".shared_experts." in name:
                yield name, value[0]
            else:
                yield name, value


def released_values(value: torch.Tensor, storage: Storage) -> torch.Tensor:
    """`value` [..., N, K] after a trip through its released storage format."""
    if storage == "f32":
        return value
    if storage == "bf16":
        return value.bfloat16().float()
    if storage == "fp4":
        return dequantize_fp4_rows(*quantize_fp4_rows(value), torch.float32)
    if storage == "fp8_rows":
        return dequantize_fp8_rows(*quantize_fp8_rows(value), torch.float32)
    flat = value.flatten(0, -2)
    return dequantize_fp8_blocks(*quantize_fp8_blocks(flat), torch.float32).view_as(value)


def _with_quantized_inputs(tree: Any, storage: dict[str, Storage], path: str = "") -> Any:
    """Linears and experts stored in FP8 or FP4 round their inputs, `wo_a` aside."""
    if isinstance(tree, tuple):
        return tuple(_with_quantized_inputs(t, storage, _join(path, i)) for i, t in enumerate(tree))
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return tree
    names = {field.name for field in dataclasses.fields(tree)}
    if "quantized_input" in names:
        first = _join(path, "value" if "value" in names else "w1")
        quantized = storage[first] in ("fp8", "fp4") and not path.endswith("wo_a")
        return dataclasses.replace(tree, quantized_input=quantized)
    changes = {
        name: _with_quantized_inputs(getattr(tree, name), storage, _join(path, name))
        for name in names
        if dataclasses.is_dataclass(getattr(tree, name)) or isinstance(getattr(tree, name), tuple)
    }
    return dataclasses.replace(tree, **changes)
