"""Private memory is bounded by the window, whatever the prompt's length."""

from __future__ import annotations

import numpy as np
import torch

from engine.config import ModelConfig
from engine.network import Network, load_weights
from engine.tensor_source import SafetensorsSource
from tests.conftest import TINY
from tests.python_backend.real_core import VOCAB, bounds_of, core_of, stream


def test_a_long_prompt_keeps_private_memory_bounded(tiny_config: ModelConfig) -> None:
    """8,192 tokens through a window pool of 64 pages of 8 rows."""
    config = tiny_config.with_changes(max_position_embeddings=8_224)
    token_class = np.arange(VOCAB) // 2
    source = SafetensorsSource(TINY)
    network = Network(config, load_weights(config, source, token_class, torch.float32))
    bounds = bounds_of(
        max_num_tokens=256,
        max_batch_size=2,
        max_seq_len=8_224,
        window_page_tokens=8,
        num_window_pages=64,
        num_global_pages=8_224 // 16 + 2,
    )
    prompt = np.random.default_rng(0).integers(3, VOCAB, 8_192, dtype=np.int32)
    one = stream("long", prompt, 2, False, 0)
    core = core_of(network, bounds)
    core.add_request(one.request)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.statistics().num_window_pages_used)
    core.check_integrity()
    assert len(one.output) == 2
    # ceil((W − 1 + rows of a step) / rows of a page) + 1
    assert most <= (7 + 256 + 7) // 8 + 1
