"""The network over packed, poisoned pages with every kernel in its place, in the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from ragged import PoisonedPages, Timeline, step

from engine.network import Network

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("the kernels are not interpreted (TRITON_INTERPRET=1)", allow_module_level=True)

# Where the network calls each operator that has a kernel.
CALLS = {
    "attention": {"mega_attention": ["mega_attention"], "kv_write": ["norm_and_write"]},
    "compress": {"compressor": ["pooled_rows"], "kv_write": ["rotated_write"]},
    "draft": {"mega_attention": ["mega_attention"]},
    "select": {
        "indexer": ["index_queries", "index_scores", "candidate_topk"],
        "topk_select": ["topk_select", "candidate_blocks"],
    },
}
# What chooses by itself between torch and a launch.
CHOOSING = ("engine.paged_cache", "plugins.row_numbers")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Puts the kernels in place; the names of those that ran."""
    names: set[str] = set()

    def watched(kernel: Callable, name: str) -> Callable:
        def run(*args, **kwargs):
            names.add(name)
            return kernel(*args, **kwargs)

        return run

    for module, kernels in CALLS.items():
        caller = importlib.import_module(f"engine.network.{module}")
        for folder, functions in kernels.items():
            kernel = importlib.import_module(f"plugins.{folder}.kernel")
            for name in functions:
                monkeypatch.setattr(caller, name, watched(getattr(kernel, name), name))
    for module in CHOOSING:
        monkeypatch.setattr(f"{module}.runs_kernels", lambda x: True)
    return names


def test_ragged_steps_give_the_golden_logits(
    network_of: Callable[[torch.dtype], Network],
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
    called: set[str],
) -> None:
    """Prefill, decode and six rows at once, beside another request; page sizes that do not divide
    anything. The golden logits are float64, the network float32."""
    network, golden = network_of(torch.float32), golden_of(True)
    tokens = golden["tokens"].tolist()
    first, second = Timeline(tokens[:18]), Timeline(tokens[:7])
    pages = PoisonedPages(
        network.config, torch.float32, quantize=True, num_slots=2, max_length=32, max_rows=12,
        global_page_tokens=6, window_page_rows=5, seed=1,
    )  # fmt: skip
    for rows in ([11, 5], [1, 1], [6, 1]):
        for slot, request in enumerate((first, second)):
            pages.extend(slot, request.position, request.position + rows[slot])
        step(network, [first, second], rows, pages.view([0, 1]), store_context=False)
    assert len(called) == 9
    for request in (first, second):
        ours = request.rows(0, request.position)
        expected = golden["logits_full"][: request.position]
        assert (ours - expected).abs().max() < 1e-4
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))
