"""Log probabilities of prompts: every token once, in order, from a whole forward in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.config import ModelConfig
from engine.network import Network, load_weights
from engine.network.run import ForwardMode, run_forward
from engine.tensor_source import SafetensorsSource
from python_backend.core import EngineCore
from python_backend.drafting.rule import DraftRule
from python_backend.request import LogProbs, SamplingParams
from tests.conftest import TINY
from tests.python_backend.real_core import VOCAB, bounds_of, core_of
from tests.python_backend.serving import Stream, finish, limits, new_core, tokens

Int32Array = npt.NDArray[np.int32]


def judged(name: str, prompt: Int32Array, max_tokens: int = 3, **sampling: Any) -> Stream:
    stream = Stream(name, prompt, max_tokens)
    wanted = SamplingParams(**({"prompt_logprobs": 2} | sampling))
    stream.request = dataclasses.replace(stream.request, sampling=wanted)
    return stream


def received(stream: Stream) -> LogProbs:
    """All pieces, which must have come before the first token."""
    pieces = [delta.prompt_logprobs for delta in stream.deltas]
    count = sum(piece is not None for piece in pieces)
    assert all(piece is not None for piece in pieces[:count])
    assert not any(len(delta.output_ids) for delta in stream.deltas[:count])
    return LogProbs(*(np.concatenate(parts) for parts in zip(*pieces[:count], strict=True)))


def run(core: EngineCore, *streams: Stream) -> None:
    for stream in streams:
        core.add_request(stream.request)
    finish(core)


def assert_judged(got: LogProbs, prompt: Int32Array, logits: torch.Tensor) -> None:
    """Against the log softmax of logits [N, V], float64; what is reported is float32."""
    expected = logits[:-1].log_softmax(-1)
    targets = torch.from_numpy(prompt[1:].astype(np.int64))
    wanted = expected.gather(-1, targets[:, None]).squeeze(-1).numpy()
    np.testing.assert_allclose(got.chosen, wanted, rtol=1e-6, atol=1e-6)
    top = expected.topk(got.top.shape[1], dim=-1)
    np.testing.assert_allclose(got.top, top.values.numpy(), rtol=1e-6, atol=1e-6)
    assert got.top_ids.tolist() == top.indices.tolist()


def test_golden_prompt(network64: Network, golden_of: Callable[[bool], dict[str, Any]]) -> None:
    """The golden full forward's logits; in two chunks."""
    golden = golden_of(True)
    prompt = golden["tokens"].numpy().astype(np.int32)
    stream = judged("golden", prompt)
    run(core_of(network64, bounds_of(max_num_tokens=40)), stream)
    assert_judged(received(stream), prompt, golden["logits_full"])


class Whole(NamedTuple):
    """A prompt longer than the golden model allows, and the logits of its full forward."""

    network: Network
    prompt: Int32Array
    logits: torch.Tensor


@pytest.fixture(scope="module")
def whole(tiny_config: ModelConfig, golden_of: Callable[[bool], dict[str, Any]]) -> Whole:
    config = tiny_config.with_changes(max_position_embeddings=1110)
    token_class = golden_of(True)["token_class"].numpy()
    weights = load_weights(config, SafetensorsSource(TINY), token_class, torch.float64)
    network = Network(config, weights)
    prompt = np.random.default_rng(1).integers(3, VOCAB, 1100, dtype=np.int32)
    logits = run_forward(network, prompt, ForwardMode.FULL)["logits"]
    return Whole(network, prompt, logits)


@pytest.mark.parametrize("draft", [None, DraftRule(most=3, min_survival=0.0)], ids=["off", "on"])
def test_lengths_with_drafts_on_and_off(whole: Whole, draft: DraftRule | None) -> None:
    """vLLM PR 53520: prompt log probabilities came out wrong for some lengths. Drafts on and off
    give those of the full forward, whose rows do not depend on what follows. A prompt whose
    beginning was served before is neither taken from the prefix cache nor trimmed."""
    network, prompt, logits = whole
    bounds = bounds_of(draft=draft, max_num_tokens=600, max_seq_len=1110, max_batch_size=4)
    core = core_of(network, bounds)
    run(core, Stream("before", prompt[:40], 1))
    streams = [
        judged(str(length), prompt[:length], new, prompt_logprobs=top)
        for length, new, top in ((200, 4, 0), (512, 3, 2), (513, 2, 1), (1100, 2, 2))
    ]
    run(core, *streams)
    for stream in streams:
        length = len(stream.request.input_ids)
        assert_judged(received(stream), prompt[:length], logits[:length])
        assert stream.cached_tokens == 0
        assert stream.output[0] == logits[length - 1].argmax()


def test_such_a_prompt_fills_the_prefix_cache() -> None:
    core = new_core(limits())
    run(core, judged("judged", tokens(1, 60)))
    again, once_more = judged("again", tokens(1, 60)), Stream("plain", tokens(1, 60), 3)
    run(core, again)
    run(core, once_more)
    assert (again.cached_tokens, once_more.cached_tokens) == (0, 48)


def check_once(streams: Sequence[Stream]) -> None:
    """The checking executor reports each target's own number, negative."""
    for stream in streams:
        got = received(stream)
        assert (-got.chosen).tolist() == stream.request.input_ids[1:].tolist()
        assert got.top_ids.shape == (len(stream.request.input_ids) - 1, 2)
        stream.assert_served()


def test_the_logits_of_a_step_are_bounded() -> None:
    """A vocabulary of 2^22: eight rows of logits are 128 MiB of float32. Two such prompts share
    them, and one without runs its 32 rows a step beside them."""
    bounds = limits(vocab_size=1 << 22)
    assert bounds.max_judged_rows == 8
    core = new_core(bounds)
    streams = [judged("a", tokens(1, 30)), judged("b", tokens(2, 30))]
    plain = Stream("plain", tokens(3, 60), 1)
    for stream in (*streams, plain):
        core.add_request(stream.request)
    num_steps = 0
    while plain.finish_reason is None:
        core.step()
        num_steps += 1
    assert num_steps == 3  # 24 + 24 + 12 rows beside 8 of `a`
    assert not streams[1].deltas
    finish(core)
    for stream in streams:
        assert (-received(stream).chosen).tolist() == stream.request.input_ids[1:].tolist()


def test_preemption_repeats_nothing() -> None:
    """Three requests outgrow six pages of 16: the prompt of one that was judged runs again, and
    no token of it is reported twice."""
    core = new_core(limits(num_global_pages=7, max_num_tokens=16))
    streams = [judged(name, tokens(i, 20), 40) for i, name in enumerate("abc")]
    run(core, *streams)
    assert core.statistics().num_preemptions > 0
    check_once(streams)


def test_a_prompt_of_one_token_has_nothing_to_judge() -> None:
    stream = judged("one", tokens(1, 1))
    run(new_core(limits()), stream)
    assert all(delta.prompt_logprobs is None for delta in stream.deltas)
    stream.assert_served()
