"""The second half of a layer with all of its kernels in place, in the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from engine.network import Network, block
from engine.network.block import Residual, after_attention, attention_input, taken

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("the kernels are not interpreted (TRITON_INTERPRET=1)", allow_module_level=True)

KERNELS = {
    "mega_gate": ["mega_gate"],
    "mega_mhc": ["hc_mix", "hc_expand", "hc_collapse", "mega_mhc", "hc_advance"],
    "moe": ["moe"],
    "norm": ["rms_norm"],
}


def test_the_golden_experts_and_streams(
    network_of: Callable[[torch.dtype], Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random streams through a layer of the golden weights: float32 kernels, float64 references."""
    draw = torch.Generator().manual_seed(0)
    network = network_of(torch.float64)
    config = network.config
    weights = {
        dtype: network_of(dtype).weights.layers[0] for dtype in (torch.float32, torch.float64)
    }
    streams = torch.randn(5, config.hc_mult, config.hidden_size, generator=draw)
    pre, y = (
        torch.rand(5, config.hc_mult, generator=draw),
        torch.randn(5, config.hidden_size, generator=draw),
    )

    def half_layer(dtype: torch.dtype) -> list[torch.Tensor]:
        residual = Residual(streams.to(dtype), pre.to(dtype))
        layer = weights[dtype]
        entered = attention_input(residual, layer, config)
        top_k = config.num_experts_per_tok
        left = after_attention(entered, y.to(dtype), layer, config, top_k=top_k, is_image=None)
        # Through the next layer's input both passes over the streams are taken.
        after = attention_input(left, layer, config)
        return [entered.u, *left.written(), after.streams, *taken(after.mix), after.u]

    expected = half_layer(torch.float64)
    called = set()

    def watched(kernel: Callable, name: str) -> Callable:
        def run(*args, **kwargs):
            called.add(name)
            return kernel(*args, **kwargs)

        return run

    for folder, functions in KERNELS.items():
        kernel = importlib.import_module(f"plugins.{folder}.kernel")
        for name in functions:
            monkeypatch.setattr(block, name, watched(getattr(kernel, name), name))
    ours = half_layer(torch.float32)
    assert len(called) == 7
    assert "hc_advance" not in called
    # Few rows on a device: the mix is not the pass's, and its bits are the same.
    monkeypatch.setattr(block, "runs_kernels", lambda x: True)
    called.clear()
    with torch.no_grad():
        beside = half_layer(torch.float32)
    assert len(called) == 7
    assert "mega_mhc" not in called
    assert all(map(torch.equal, beside, ours))
    for one, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-5, atol=2e-5)
