"""Replays around and below one window on the real network, against the reference run."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.network import Network
from engine.network.run import ForwardMode, run_forward
from python_backend.replay import ReplayRule
from tests.conftest import TINY
from tests.python_backend.real_core import bounds_of, core_of, serve, stream

WINDOW = 8
HIT = 48
PROMPT = load_file(TINY / "golden_quant.safetensors")["tokens"].astype(np.int32)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_a_hit_continues_as_the_reference_does(network64: Network, length: int) -> None:
    """61 tokens on a hit of 48: the token is the argmax of a reference run with the same floors."""
    bounds = bounds_of(replay=ReplayRule(WINDOW, length, length, 16))
    core = core_of(network64, bounds)
    serve(core, [stream("primer", PROMPT, 1, False, 0)], [0])
    one = stream("hit", PROMPT, 1, False, 0)
    serve(core, [one], [0])
    assert one.cached_tokens == HIT
    logits = run_forward(network64, PROMPT, ForwardMode.BOTH, hit=HIT, replay_length=length)[
        "logits"
    ]
    assert one.output == [int(logits[-1].argmax())]


def test_nothing_replayed_still_answers(network64: Network) -> None:
    """The decoder runs the last row alone; in a cold run that is a tail of one row."""
    core = core_of(network64, bounds_of(replay=ReplayRule(WINDOW, 0, 1, 16)))
    cold = stream("cold", PROMPT, 1, False, 0)
    serve(core, [cold], [0])
    logits = run_forward(network64, PROMPT, ForwardMode.DECODER_REPLAY, replay_length=1)["logits"]
    assert cold.output == [int(logits[-1].argmax())]
    hit = stream("hit", PROMPT, 4, False, 0)
    serve(core, [hit], [0])
    assert hit.cached_tokens == HIT
    assert len(hit.output) == 4
    assert core.statistics().num_replayed_rows == 0
