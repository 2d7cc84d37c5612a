"""Training batches as the network's ragged batches: even lengths, floors as when serving."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.batch import BoolArray, Int32Array, RaggedBatch, StepArrays
from engine.config import ModelConfig
from examples.tinyflash.mixture import Batch
from examples.tinyflash.tokenizer import PAD_ID

# A retrieved value is one token in a long document; everything else in its answer is easy.
_RETRIEVAL_WEIGHT = 4.0


class TrainingBatch(NamedTuple):
    """T rows of R conversations. `loss_rows` index the decoder rows."""

    ragged: RaggedBatch
    query_start: Int32Array  # [R + 1], the same on the host
    loss_rows: torch.Tensor  # [M] decoder rows whose next token the model writes
    targets: torch.Tensor  # [M] that token
    weights: torch.Tensor  # [M] float32, what its loss counts


def training_batch(
    batch: Batch, config: ModelConfig, device: str, *, trimmed: bool
) -> TrainingBatch:
    """`trimmed`: the decoder runs from one window before the first written token on, as bounded
    replay does when serving; otherwise on all rows."""
    tokens, mask, query_start = _even(batch)
    requests = len(query_start) - 1
    first_written = np.array(
        [np.argmax(part) if part.any() else len(part) for part in np.split(mask, query_start[1:-1])]
    )
    floor = np.maximum(first_written - config.sliding_window, 0) if trimmed else 0 * first_written
    zeros = np.zeros(requests, dtype=np.int64)
    arrays = StepArrays(
        tokens=tokens,
        query_start=query_start,
        first_position=zeros,
        encoder_floor=zeros,
        decoder_floor=floor.astype(np.int64),
        write_floor=zeros,
        history=np.full((requests, config.engram_max_ngram_size - 1), -1, dtype=np.int32),
        wants_logits=np.ones(requests, dtype=np.bool_),
    )
    written = np.flatnonzero(mask)
    weight = np.array([_RETRIEVAL_WEIGHT if t == "retrieval" else 1.0 for t in batch.tasks])
    weight = weight.astype(np.float32)
    row = np.arange(len(tokens)) - np.repeat(query_start[:-1], np.diff(query_start))
    decoder_rows = np.flatnonzero(row >= np.repeat(floor, np.diff(query_start)))
    return TrainingBatch(
        arrays.to_torch(device, all_logits=True),
        query_start,
        torch.from_numpy(np.searchsorted(decoder_rows, written - 1)).to(device),
        torch.from_numpy(tokens[written].astype(np.int64)).to(device),
        torch.from_numpy(np.repeat(weight, np.diff(query_start))[written]).to(device),
    )


def _even(batch: Batch) -> tuple[Int32Array, BoolArray, Int32Array]:
    """The batch with one padding token behind every conversation of odd length."""
    lengths = np.diff(batch.query_start)
    odd = lengths % 2
    places = batch.query_start[1:][odd == 1]
    tokens = np.insert(batch.tokens, places, PAD_ID)
    mask = np.insert(batch.mask, places, False)
    query_start = np.concatenate([[0], np.cumsum(lengths + odd)]).astype(np.int32)
    return tokens, mask, query_start
