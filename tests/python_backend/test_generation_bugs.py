"""Bugs that other servers had with answers, on the real network, named after what went wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from engine.config import ModelConfig
from engine.network import Network, load_weights
from engine.tensor_source import SafetensorsSource
from python_backend.request import FinishReason, SamplingParams
from tests.conftest import TINY
from tests.python_backend.real_core import VOCAB, bounds_of, core_of
from tests.python_backend.serving import Stream

HOT = SamplingParams(temperature=1.0, seed=7, logprobs=5)


def test_a_hundred_cancelled_streams_with_log_probabilities(tiny_config: ModelConfig) -> None:
    """A cancelled stream with log probabilities killed the engine, or left its pages. Fifty at
    a time, twice, each after 1 to 3 deltas; an equal one beside them is never disturbed, and what
    the others got is the beginning of its answer."""
    classes = np.arange(VOCAB) // 2
    source = SafetensorsSource(TINY)
    network = Network(tiny_config, load_weights(tiny_config, source, classes, torch.float32))
    core = core_of(network, bounds_of(max_batch_size=51, max_num_tokens=300))

    def stream(name: str, max_tokens: int) -> Stream:
        made = Stream(name, np.arange(3, 5, dtype=np.int32), max_tokens)
        made.request = dataclasses.replace(made.request, sampling=HOT)
        return made

    witness = stream("witness", 4)
    core.add_request(witness.request)
    gone: list[Stream] = []
    for wave in range(2):
        streams = [stream(f"gone {wave} {i}", 100) for i in range(50)]
        for each in streams:
            core.add_request(each.request)
        waiting = dict(enumerate(streams))
        while waiting:
            core.step()
            for i in [i for i, each in waiting.items() if len(each.deltas) > i % 3]:
                core.cancel(waiting.pop(i).request.request_id)
        gone += streams
    while core.has_work:
        core.step()
    core.check_integrity()

    whole = [delta for delta in witness.deltas if len(delta.output_ids)]
    assert len(witness.output) == 4
    for i, each in enumerate(gone):
        *told, last = each.deltas
        assert last.finish_reason is FinishReason.CANCELLED
        assert len(told) == 1 + i % 50 % 3
        for delta, expected in zip(told, whole, strict=False):
            assert delta.output_ids.tolist() == expected.output_ids.tolist()
            assert delta.logprobs is not None
            assert expected.logprobs is not None
            np.testing.assert_array_equal(delta.logprobs.chosen, expected.logprobs.chosen)
            assert delta.logprobs.top_ids.tolist() == expected.logprobs.top_ids.tolist()
    statistics = core.statistics()
    assert statistics.num_global_pages_used == statistics.num_window_pages_used == 0
    assert statistics.num_finished[FinishReason.CANCELLED] == 100
