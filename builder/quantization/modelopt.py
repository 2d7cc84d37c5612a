"""NVIDIA ModelOpt's quantisation of one piece of a weight, checked against our decoding.

ModelOpt's own road is taken: `mtq.quantize` with its configuration, then `mtq.compress`, on a
linear module that holds some rows of the weight. NVFP4 needs the largest magnitude of the whole
weight, which a piece does not know; it is set on the module's weight quantizer in between.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from builder.layout import Requantized
from engine.config import ConfigError
from engine.tensor_source import CheckpointError
from plugins.formats.rounding import E2M1_MAX, E4M3_MAX
from plugins.linear import PackedFormat, PackedMatrix

TESTED_VERSION = "0.47.0"
# ModelOpt's names: weights only, weights with MXFP8 inputs, weights with calibrated NVFP4 inputs.
LayerFormat = Literal["w4a16_nvfp4", "mxfp8", "nvfp4"]
_GROUPS: Mapping[LayerFormat, int] = {"w4a16_nvfp4": 16, "mxfp8": 32, "nvfp4": 16}
_NVFP4_MAX = E2M1_MAX * E4M3_MAX
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a weight: stored tensors, and the values that they stand for."""

    matrix: PackedMatrix
    values: torch.Tensor  # float32 [n, K]

    def stored(self, name: str, base: str) -> dict[str, torch.Tensor]:
        """By name, without the global scale."""
        return {name: self.matrix.codes, f"{base}.weight_scale": self.matrix.scale}


def check_modelopt() -> list[str]:
    """Warnings about the installed ModelOpt. Raises ConfigError when there is none."""
    try:
        modelopt()
    except ImportError as error:
        raise ConfigError(
            f"quantisation to NVFP4 or MXFP8 needs NVIDIA ModelOpt, tested with {TESTED_VERSION}, "
            f"and it cannot be imported ({error}); in a checkout, pip install '.[quantize]'"
        ) from None
    found = modelopt_version()
    if found == TESTED_VERSION:
        return []
    return [
        f"ModelOpt {found} is installed, and {TESTED_VERSION} is what was tested; every tensor is "
        "still decoded and compared while it is written"
    ]


def modelopt_version() -> str | None:
    """The installed version, None where there is none."""
    try:
        return version("nvidia-modelopt")
    except PackageNotFoundError:
        return None


def describe_layers(
    formats: Mapping[str, LayerFormat | None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """ModelOpt's descriptions of modules by name: hf_quant_config.json (without its producer), and
    quantization_config of config.json."""
    with quiet():
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
        from modelopt.torch.export.quant_utils import process_layer_quant_config

        layers: dict[str, str | int | None] = {}
        for name, layer_format in formats.items():
            layers[f"{name}.quantization"] = layer_format
            if layer_format is not None:
                layers[f"{name}.awq_block_size"] = _GROUPS[layer_format]
        description = {"quantization": process_layer_quant_config(layers)}
        return description, convert_hf_quant_config_format(description)


def global_scale(name: str, amax: float) -> torch.Tensor:
    """NVFP4's float32 [] scale of a weight with this largest magnitude; 1 for zeros only."""
    if 0 < amax < _NVFP4_MAX * _SMALLEST_NORMAL:
        raise CheckpointError(
            f"{name}: its largest magnitude {amax:.3g} is too small for an NVFP4 global scale; "
            "give it the format mxfp8 or source in a recipe"
        )
    return torch.tensor(amax if amax > 0 else _NVFP4_MAX, dtype=torch.float32) / _NVFP4_MAX


def quantize_rows(
    name: str, values: torch.Tensor, format: Requantized, amax: float
) -> QuantizedRows:
    """float32 [n, K] through ModelOpt; `amax` is the whole weight's largest magnitude.

    Raises CheckpointError when our decoding of the stored bytes is not ModelOpt's.
    """
    mtq = modelopt()
    linear = torch.nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(values.clone(), requires_grad=False)
    module = torch.nn.ModuleDict({"linear": linear})
    with quiet(), torch.no_grad():
        config = mtq.W4A16_NVFP4_CFG if format == "nvfp4" else mtq.MXFP8_DEFAULT_CFG
        module = mtq.quantize(module, copy.deepcopy(config))
        quantizer: Any = module["linear"].weight_quantizer
        if format == "nvfp4":
            quantizer.amax = global_scale(name, amax) * _NVFP4_MAX
        mtq.compress(module)
        # The quantizer of a compressed weight gives its values back.
        decoded = quantizer(module["linear"].weight).to(torch.float32)
    codes = module.state_dict()["linear.weight"]
    scale = quantizer._scale.view(values.shape[0], -1)
    rows, columns = values.shape
    matrix = PackedMatrix(
        PackedFormat(format),
        (rows, columns),
        codes,
        scale,
        quantizer._double_scale if format == "nvfp4" else None,
        torch.float32,
    )
    if not torch.equal(matrix.dequantize(), decoded):
        raise CheckpointError(
            f"{name}: its {format} bytes do not decode to ModelOpt's values; ModelOpt "
            f"{modelopt_version()} is installed, {TESTED_VERSION} was tested"
        )
    if not torch.isfinite(decoded.to(torch.bfloat16)).all():
        raise CheckpointError(
            f"{name}: its largest magnitude {amax:.3g} overflows in {format}; "
            "give it the format source in a recipe"
        )
    return QuantizedRows(matrix, decoded)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For calls of ModelOpt: keep its notes, warnings and progress off the terminal.

    What another version than the tested one raises becomes ConfigError.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except (ConfigError, CheckpointError, ImportError, OSError):
        raise
    except Exception as error:  # an older version lacks names or fails deep inside
        if modelopt_version() == TESTED_VERSION:
            raise
        raise ConfigError(
            f"ModelOpt {modelopt_version()} cannot be used here: {error}; {TESTED_VERSION} is what "
            "was tested, and in a checkout pip install '.[quantize]' brings it"
        ) from error
    finally:
        logging.disable(before)


@functools.cache
def modelopt() -> Any:
    """ModelOpt's quantisation module; its import takes many seconds."""
    with quiet():
        import modelopt.torch.quantization as mtq
    return mtq
