"""A network's weights that show what is multiplied with them.

The network multiplies with whatever tensor a weight gives. A weight to watch gives a subclass of
Tensor that calls its observer with the other side of each product; results are plain tensors and
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.network.weights import LayerWeights, NetworkWeights
from plugins.linear import LinearWeight, Matrix
from plugins.moe import ExpertWeights, PackedExpertWeights

Observer = Callable[[torch.Tensor], Any]
_PRODUCTS = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul)


def watched_weights(weights: NetworkWeights, observers: Mapping[str, Observer]) -> NetworkWeights:
    """The backbone's weights with observers by module name, such as layers.0.attn.wq_a.

    An observer gets rows [t, K] of inputs, some of them zero rows that fill a tile. Drafting is
    left out. Raises ValueError for an observer that belongs to no linear layer.
    """
    watch = _Watch(observers, weights.embed.dtype)
    layers = tuple(watch.layer(f"layers.{i}", layer) for i, layer in enumerate(weights.layers))
    unknown = observers.keys() - watch.used
    if unknown:
        raise ValueError(f"expected linear layers of the backbone, got {min(unknown)}")
    return replace(weights, layers=layers, draft=None)


class _Watch:
    def __init__(self, observers: Mapping[str, Observer], dtype: torch.dtype) -> None:
        self.observers = observers
        self.dtype = dtype
        self.used: set[str] = set()

    def layer(self, prefix: str, layer: LayerWeights) -> LayerWeights:
        attention, attn = layer.attention, f"{prefix}.attn"
        indexer, engram = attention.indexer, layer.engram
        if indexer is not None:
            indexer = replace(indexer, wq_b=self._linear(f"{attn}.indexer.wq_b", indexer.wq_b))
        if engram is not None:
            engram = replace(engram, wkv=self._linear(f"{prefix}.engram.wkv", engram.wkv))
        experts = f"{prefix}.ffn.experts"
        routed = [f"{experts}.{expert}" for expert in range(layer.moe.routed.count)]
        shared = [f"{prefix}.ffn.shared_experts"]
        moe = replace(
            layer.moe,
            routed=self._experts(routed, layer.moe.routed),
            shared=self._experts(shared, layer.moe.shared),
        )
        attention = replace(
            attention,
            wq_a=self._linear(f"{attn}.wq_a", attention.wq_a),
            wq_b=self._linear(f"{attn}.wq_b", attention.wq_b),
            wkv=self._linear(f"{attn}.wkv", attention.wkv),
            wo_b=self._linear(f"{attn}.wo_b", attention.wo_b),
            indexer=indexer,
        )
        return replace(layer, attention=attention, moe=moe, engram=engram)

    def _linear(self, name: str, weight: LinearWeight) -> LinearWeight:
        observer = self._observer(name)
        return weight if observer is None else _WatchedLinear(weight, observer)

    def _experts(self, names: list[str], experts: ExpertWeights) -> ExpertWeights:
        stacks = zip(("w1", "w3", "w2"), experts.matrices(), strict=True)
        w1, w3, w2 = (
            [
                _watched_matrix(matrix, self._observer(f"{name}.{part}"))
                for name, matrix in zip(names, stack, strict=True)
            ]
            for part, stack in stacks
        )
        return PackedExpertWeights(w1, w3, w2, self.dtype, experts.quantized_input)

    def _observer(self, name: str) -> Observer | None:
        if name not in self.observers:
            return None
        self.used.add(name)
        return self.observers[name]


class _Watched(torch.Tensor):
    """A weight, or a view of one, whose products are observed."""

    observer: Observer

    @classmethod
    def of(cls, values: torch.Tensor, observer: Observer) -> _Watched:
        watched = values.as_subclass(cls)
        watched.observer = observer
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if not isinstance(result, cls):
            return result
        if func in _PRODUCTS:
            left, right = args
            right.observer(left)
            return result.as_subclass(torch.Tensor)
        result.observer = next(one.observer for one in args if isinstance(one, cls))
        return result


class _WatchedLinear(LinearWeight):
    """`value` is decoded anew on each read where the weight is packed."""

    def __init__(self, weight: LinearWeight, observer: Observer) -> None:
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "observer", observer)
        object.__setattr__(self, "quantized_input", weight.quantized_input)

    weight: LinearWeight
    observer: Observer

    @property
    def value(self) -> torch.Tensor:
        return _Watched.of(self.weight.value, self.observer)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


@dataclass(frozen=True)
class _WatchedMatrix:
    matrix: Matrix
    observer: Observer

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return _Watched.of(self.matrix.to(dtype), self.observer)


def _watched_matrix(matrix: Matrix, observer: Observer | None) -> Matrix:
    return matrix if observer is None else _WatchedMatrix(matrix, observer)
