"""TinyFlash's training forward against the golden vectors and a brute-force selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.batch import RaggedBatch, StepArrays
from engine.config import ModelConfig
from engine.contiguous_cache import ContiguousCache
from engine.network.engram import EngramHash
from engine.network.network import Network
from engine.network.rope import RopeTables
from examples.tinyflash.mixture import Batch
from examples.tinyflash.training.batch import Sizes, TrainingBatch, training_batch
from examples.tinyflash.training.forward import BackboneForward
from examples.tinyflash.training.initial import initial_weights, model_config
from examples.tinyflash.training.selection import (
    Sample,
    Span,
    indexer_loss,
    select_entries,
)
from plugins.linear import linear

TOLERANCE = 1e-9
Golden = Mapping[str, torch.Tensor]


def forward_of(network: Network, data: TrainingBatch, **options: bool) -> BackboneForward:
    rope = RopeTables.build(network.config, torch.device("cpu"))
    return BackboneForward(network.config, network.weights, rope, data, **options)


def data_of(
    batch: Batch, network: Network, *, trimmed: bool, sizes: Sizes | None = None
) -> TrainingBatch:
    host = training_batch(
        batch, network.config, network.engram_hash, 0, trimmed=trimmed, sizes=sizes
    )
    return host.to("cpu")


def golden_batch(golden: Golden) -> Batch:
    """Twice the golden prompt, each with one more token, which the model is to write."""
    prompt = golden["tokens"].numpy().astype(np.int32)
    one = np.append(prompt, np.int32(7))
    mask = np.zeros(len(one), dtype=np.bool_)
    mask[-1] = True
    starts = np.array([0, len(one), 2 * len(one)], dtype=np.int32)
    return Batch(np.tile(one, 2), np.tile(mask, 2), starts, ("arithmetic", "arithmetic"))


@pytest.mark.parametrize("trimmed", [False, True])
def test_logits_equal_the_golden_ones(
    network64: Network, golden_of: Callable[[bool], Golden], trimmed: bool
) -> None:
    golden = golden_of(True)
    data = data_of(golden_batch(golden), network64, trimmed=trimmed)
    with torch.no_grad():
        logits = linear(forward_of(network64, data).run(), network64.weights.head)
    expected = golden["logits_decoder_replay" if trimmed else "logits_full"]
    for conversation in torch.tensor_split(logits, 2):
        difference = (conversation[: len(expected)] - expected).abs().max()
        assert len(conversation) == len(expected) + 1
        assert difference < TOLERANCE


def step_from(tokens: np.ndarray, start: int, stop: int) -> RaggedBatch:
    """Positions start … stop − 1 as one step that may read nothing private below `start`."""
    at = np.array([start], dtype=np.int64)
    history = np.full((1, 3), -1, dtype=np.int32)
    known = tokens[max(0, start - 3) : start]
    history[0, 3 - len(known) :] = known
    return StepArrays(
        tokens=tokens[start:stop],
        query_start=np.array([0, stop - start], dtype=np.int32),
        first_position=at,
        encoder_floor=at,
        decoder_floor=at,
        write_floor=at,
        history=history,
        wants_logits=np.array([True]),
    ).to_torch(all_logits=True)


def test_rows_behind_a_replay_start_are_those_of_a_step_after_a_hit(
    network64: Network, golden_of: Callable[[bool], Golden]
) -> None:
    config, prompt = network64.config, golden_of(True)["tokens"].numpy().astype(np.int32)
    cache = ContiguousCache(config, 1, len(prompt), torch.float64, quantize=True)
    with torch.no_grad():
        network64.forward(step_from(prompt, 0, 26), cache)
        cold = network64.forward(step_from(prompt, 0, len(prompt)), cache).logits[26:]
        cache = cache.with_fresh_private()
        hit = network64.forward(step_from(prompt, 26, len(prompt)), cache).logits
    data = data_of(golden_batch(golden_of(True)), network64, trimmed=False)
    data = data._replace(replay_start=torch.tensor([26, 0]))
    with torch.no_grad():
        logits = linear(forward_of(network64, data).run(), network64.weights.head)
    replayed, whole = torch.tensor_split(logits, 2)
    assert (replayed[26 : len(prompt)] - hit).abs().max() < TOLERANCE
    assert (whole[26 : len(prompt)] - cold).abs().max() < TOLERANCE
    assert (hit - cold).abs().max() > 1e-3


def test_replay_starts_one_to_three_windows_before_an_answer() -> None:
    """Windows of 4: 5 … 12 rows before position 40 or 60, evenly, in about half of 400."""
    config = replace(model_config(), sliding_window=4)
    engram = EngramHash(config, initial_weights(config, 0).token_class)
    mask = np.zeros((400, 70), dtype=np.bool_)
    mask[:, 40:45] = mask[:, 60:70] = True
    starts = np.arange(401, dtype=np.int32) * 70
    tokens = np.full(28000, 9, dtype=np.int32)
    batch = Batch(tokens, mask.flatten(), starts, ("turns",) * 400)
    made = training_batch(batch, config, engram, 1, trimmed=True, replayed=0.5).replay_start
    assert 150 < np.count_nonzero(made) < 250
    assert set(made.tolist()) == {0, *range(28, 36, 2), *range(48, 56, 2)}


def test_padding_changes_no_row(network64: Network, golden_of: Callable[[bool], Golden]) -> None:
    golden = golden_of(True)
    sizes = Sizes(rows=160, requests=6, decoder_rows=70, written=9, max_context=62)
    data = data_of(golden_batch(golden), network64, trimmed=True, sizes=sizes)
    with torch.no_grad():
        logits = linear(forward_of(network64, data).run(), network64.weights.head)
    assert len(data.ragged.tokens) == 160
    assert len(logits) == 70
    expected = golden["logits_decoder_replay"]
    rows = len(expected) + 1
    for first in (0, rows):
        assert (logits[first : first + len(expected)] - expected).abs().max() < TOLERANCE
    assert data.weights.tolist() == [1.0, 1.0, *[0.0] * 7]
    assert data.targets[:2].tolist() == [7, 7]


def test_draft_features_equal_the_golden_ones(
    network64: Network, golden_of: Callable[[bool], Golden]
) -> None:
    golden = golden_of(True)
    data = data_of(golden_batch(golden), network64, trimmed=False)
    forward = forward_of(network64, data, draft_features=True)
    with torch.no_grad():
        forward.run()
    features = torch.cat(forward.collected.draft_features, dim=-1)[:61]
    assert (features - golden["draft_features"]).abs().max() < TOLERANCE


def test_loss_rows_predict_the_written_tokens() -> None:
    """Two conversations of odd lengths 5 and 3; tokens 3, 4 and 2 are written."""
    config = replace(model_config(), sliding_window=2)
    engram = EngramHash(config, initial_weights(config, 0).token_class)
    tokens = np.array([10, 11, 12, 13, 14, 20, 21, 22], dtype=np.int32)
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1], dtype=np.bool_)
    batch = Batch(tokens, mask, np.array([0, 5, 8], dtype=np.int32), ("arithmetic", "retrieval"))
    data = training_batch(batch, config, engram, 0, trimmed=True).to("cpu")
    # One padding token (id 2) follows each; the decoder starts at positions 3 − 2 and 2 − 2.
    assert data.ragged.tokens.tolist() == [10, 11, 12, 13, 14, 2, 20, 21, 22, 2]
    assert data.ragged.decoder_rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rows = data.ragged.decoder_rows[data.loss_rows]
    assert data.ragged.tokens[rows].tolist() == [12, 13, 21]
    assert data.targets.tolist() == [13, 14, 22]
    assert data.weights.tolist() == [1.0, 1.0, 4.0]


@pytest.mark.parametrize("ratio_layer", [2, 6])
def test_selection_takes_the_best_entries(tiny_config: ModelConfig, ratio_layer: int) -> None:
    """Conversations of 6, 20 and 300 rows; a Python oracle scores every entry in float64."""
    generator = torch.Generator().manual_seed(3)
    starts = np.array([0, 6, 26, 326], dtype=np.int32)
    ratio = tiny_config.ratio(ratio_layer)
    queries = torch.randn(326, 3, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(326, 3, generator=generator, dtype=torch.float64)
    keys = torch.randn(326 // ratio, 8, generator=generator, dtype=torch.float64)
    start = torch.from_numpy(np.repeat(starts[:-1], np.diff(starts)).astype(np.int64))
    position = torch.arange(326) - start
    span = Span(start // ratio, (position + 1) // ratio, 300 // ratio)
    slots, _ = select_entries(
        queries, weights, keys, span, position, tiny_config, ratio_layer, None
    )
    for first, end in pairwise(starts):
        for row in (first, first + 1, first + 5, end - 1):
            visible = (row - first + 1) // ratio
            entries = range(first // ratio, first // ratio + visible)
            scores = {
                e: sum(float(w) * max(0.0, float(q @ keys[e])) for q, w in
                       zip(queries[row], weights[row], strict=True))
                for e in entries
            }  # fmt: skip
            best = sorted(scores, key=lambda e: -scores[e])[: tiny_config.index_topk]
            chosen = [int(s) for s in slots[row] if s >= 0]
            assert sorted(chosen) == sorted(best)


def test_indexer_loss_is_zero_where_scores_give_the_target() -> None:
    """One row, three visible entries, one head: scores log 1, log 2, log 4 give 1/7, 2/7, 4/7."""
    keys = torch.log(torch.tensor([[2.0], [4.0], [8.0]], dtype=torch.float64))
    sample = Sample(torch.tensor([2]), torch.tensor([0]), torch.tensor([2]))
    queries, weights = torch.ones(1, 1, 1).double(), torch.ones(1, 1).double()
    target = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64) / 7.0
    assert abs(float(indexer_loss(queries, weights, keys, target, sample, 1))) < 1e-8
    uniform = torch.full((1, 3), 1.0 / 3.0, dtype=torch.float64)
    shares = (1 / 7, 2 / 7, 4 / 7)
    expected = sum(1 / 3 * float(np.log(1 / 3 / share)) for share in shares)
    got = float(indexer_loss(queries, weights, keys, uniform, sample, 1))
    assert abs(got - expected) < 1e-8


def test_the_candidate_source_learns_what_the_layers_above_attend_to(
    network64: Network, golden_of: Callable[[bool], Golden]
) -> None:
    """Index sources 2, 4, 8 and 10 teach in this order, candidate source 6 last. Only the queries
    of layer 11 change, which selects by source 10 among the blocks of 6."""
    data = data_of(golden_batch(golden_of(True)), network64, trimmed=False)
    rope = RopeTables.build(network64.config, torch.device("cpu"))
    losses = []
    for factor in (1.0, 4.0):
        *below, last = network64.weights.layers
        queries = replace(last.attention.wq_b, value=factor * last.attention.wq_b.value)
        last = replace(last, attention=replace(last.attention, wq_b=queries))
        weights = replace(network64.weights, layers=(*below, last))
        forward = BackboneForward(network64.config, weights, rope, data)
        with torch.no_grad():
            forward.run()
        losses.append([float(loss) for loss in forward.collected.indexer_losses])
    before, after = losses
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same == [True, True, True, False, False]
