"""Speculative generation on the golden model, whose float64 continuation is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from engine.network.network import Network
from examples.tinyflash.speculate import Generation, generate

Golden = Mapping[str, torch.Tensor]
NO_END = -1


@pytest.mark.parametrize("drafts", [False, True])
def test_the_text_is_the_golden_continuation(
    network64: Network, golden_of: Callable[[bool], Golden], drafts: bool
) -> None:
    """With drafts or without, and beside requests of other lengths that end earlier."""
    golden = golden_of(True)
    prompt = golden["tokens"][:20].numpy().astype(np.int32)
    expected = golden["greedy_from_20_replay"].tolist()
    prompts = [prompt[:9], prompt, prompt[:14]]
    made = generate(network64, prompts, max_tokens=24, end_id=NO_END, drafts=drafts)
    assert made.outputs[1] == expected
    assert [len(output) for output in made.outputs] == [24, 24, 24]


def test_drafts_change_no_text_and_the_end_ends_it(
    network64: Network, golden_of: Callable[[bool], Golden]
) -> None:
    golden = golden_of(True)
    prompt = golden["tokens"][:20].numpy().astype(np.int32)
    expected = golden["greedy_from_20_replay"].tolist()
    end = expected[10]
    for drafts in (False, True):
        made = generate(network64, [prompt], max_tokens=24, end_id=end, drafts=drafts)
        assert made.outputs[0] == expected[: expected.index(end) + 1]


def test_acceptance_is_counted_by_position() -> None:
    """Of ten verifications four took no draft, three one, two two, one all three."""
    made = Generation([], [4, 3, 2, 1])
    assert made.acceptance_by_position == pytest.approx([0.6, 0.3, 0.1])
    assert made.mean_accepted == pytest.approx(1.0)
