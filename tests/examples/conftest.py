"""What tests of the training share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.config import ModelConfig
from examples.tinyflash.training.initial import model_config


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Several threads sum the gradients of table rows in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    """TinyFlash, narrow: the vocabulary and every mechanism stay."""
    return replace(
        model_config(), hidden_size=64, num_attention_heads=2, head_dim=32, q_lora_rank=32,
        o_lora_rank=32, index_n_heads=2, index_head_dim=32, n_routed_experts=4,
        moe_intermediate_size=32,
    )  # fmt: skip
