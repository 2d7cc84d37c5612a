"""Random weights made on the device, in the released formats: a rank of the full model needs no
checkpoint, and nothing passes through the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from builder.layout import Init, WeightSpec, all_weights
from builder.token_class import proportional_token_class
from engine.config import ModelConfig
from engine.network import Network, load_weights
from engine.network.device import moved
from engine.safetensors_file import TensorInfo
from plugins.formats.records import engram_record

_SPREAD = {
    Init.UNIT: (0.0, 1.0),
    Init.NORM: (1.0, 0.1),
    Init.BASE: (0.0, 0.5),
    Init.SCALE: (0.5, 0.3),
    Init.BIAS: (0.0, 0.2),
}
_CODE_SPREAD = {"fp8": 64.0, "fp4": 2.9}  # standard deviations of the codes drawn below
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class RandomSource:
    """A tensor source of a checkpoint that is drawn when it is read."""

    def __init__(self, config: ModelConfig, device: str, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._infos: dict[str, TensorInfo] = {}
        self._specs: dict[str, WeightSpec] = {}
        for spec in all_weights(config):
            stored = spec.released()
            if spec.storage == "fp8_rows":
                record = engram_record(spec.shape[1])
                shape = (spec.shape[0], record.bytes_per_row)
                stored = {f"{spec.base}.rows": TensorInfo("U8", shape)}
            self._infos.update(stored)
            self._specs.update(dict.fromkeys(stored, spec))

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def names(self) -> Iterable[str]:
        return self._infos

    def describe(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> torch.Tensor:
        spec, info = self._specs[name], self._infos[name]
        if info.dtype in _DTYPES:
            mean, spread = _SPREAD.get(spec.init, (0.0, _fan_in(spec)))
            return self._normal(info.shape, _DTYPES[info.dtype]).mul_(spread).add_(mean)
        if info.dtype == "F8_E8M0":
            exponent = round(math.log2(_fan_in(spec) / _CODE_SPREAD[spec.storage]))
            return torch.full(info.shape, 127 + exponent, dtype=torch.uint8, device=self._device)
        if info.dtype == "F8_E4M3":
            normal = self._normal(info.shape, torch.bfloat16).mul_(_CODE_SPREAD["fp8"])
            return normal.clamp_(-448, 448).to(torch.float8_e4m3fn)
        if info.dtype == "I8":  # two E2M1 codes a byte, each as likely
            return self._bytes(info.shape).view(torch.int8)
        # Engram records: E4M3 codes of magnitudes below 2, scales of 1.
        rows = self._bytes(info.shape)
        width = spec.shape[1]
        rows[:, :width].bitwise_and_(0xBF)
        rows[:, width:] = 127
        return rows

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._generator)

    def _bytes(self, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return made.random_(0, 256, generator=self._generator)


def _fan_in(spec: WeightSpec) -> float:
    spread = float(spec.shape[-1]) ** -0.5
    return 2 * spread if spec.init is Init.DOUBLED else spread


def random_network(
    config: ModelConfig, dtype: torch.dtype, device: str, *, seed: int = 0, **options: Any
) -> Network:
    """A network with random packed weights on `device`; options as in engine.network.device."""
    source = RandomSource(config, device, seed)
    weights = load_weights(config, source, proportional_token_class(config), dtype, packed=True)
    return Network(config, moved(weights, device, **options))
