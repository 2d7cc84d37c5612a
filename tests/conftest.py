"""The golden TINY model, loaded once per run and per dtype. torch is imported on first use, so
that tests of torch-free packages stay fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from engine.config import ModelConfig
    from engine.network import Network

# Kernels in the Triton language run in its interpreter where there is no GPU; it must be known
# before the first of them is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TINY = Path(__file__).parent / "vectors" / "tiny"
Golden = dict[str, Any]


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
        from tests.interpreter import make_faster

        make_faster()


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The golden checkpoint's directory; see the README in it for where the numbers come from."""
    return TINY


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    from engine.config_reader import read_config_file

    return read_config_file(TINY / "config.json")[0]


@pytest.fixture(scope="session")
def golden_of() -> Callable[[bool], Golden]:
    """golden_of(quantize): the golden tensors with cache quantisation on or off."""
    from safetensors.torch import load_file

    files = {
        quantize: load_file(TINY / f"golden_{name}.safetensors")
        for quantize, name in ((True, "quant"), (False, "exact"))
    }
    return files.__getitem__


@pytest.fixture(scope="session")
def network_of(
    tiny_config: ModelConfig, golden_of: Callable[[bool], Golden]
) -> Callable[[torch.dtype], Network]:
    """network_of(dtype): the golden model in that compute dtype. Treat it as read-only."""
    from engine.network import Network, load_weights
    from engine.tensor_source import SafetensorsSource

    source = SafetensorsSource(TINY)
    token_class = golden_of(True)["token_class"].numpy()
    networks: dict[torch.dtype, Network] = {}

    def load(dtype: torch.dtype) -> Network:
        if dtype not in networks:
            networks[dtype] = Network(
                tiny_config, load_weights(tiny_config, source, token_class, dtype)
            )
        return networks[dtype]

    return load


@pytest.fixture(scope="session")
def network64(network_of: Callable[[torch.dtype], Network]) -> Network:
    """The golden model in float64, in which it is the definition."""
    import torch

    return network_of(torch.float64)
