"""Training batches as the network's ragged batches: even lengths, floors as when serving.

On a device every step of a stage has the same shapes, so that one captured graph runs them all:
`Sizes` says what a batch is padded to. The padding is one more conversation at the end; no loss
counts there and nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import BoolArray, Int32Array, Int64Array, RaggedBatch, StepArrays
from engine.config import ModelConfig
from engine.network.engram import EngramHash
from examples.tinyflash.mixture import Batch
from examples.tinyflash.tokenizer import PAD_ID

N = TypeVar("N", bound=np.generic)

# A retrieved value is one token in a long document; everything else in its answer is easy.
_RETRIEVAL_WEIGHT = 4.0
# Rows of each segment that teach its indexers.
_NUM_SAMPLES = 256
# Conversations have 200 tokens on average, and a written share of 0.31 at most.
_TOKENS_PER_REQUEST = 64
_WRITTEN_SHARE = 0.35
_DECODER_SHARE = 0.45
_ALIGNMENT = 128


@dataclass(frozen=True)
class Sizes:
    """Lengths of a batch's arrays: T rows, R requests, Td decoder rows, M written."""

    rows: int
    requests: int
    decoder_rows: int
    written: int
    max_context: int

    @staticmethod
    def fixed(tokens_per_batch: int, seq_len: int, *, trimmed: bool) -> Sizes:
        """What every batch of these sizes fits into."""
        requests = tokens_per_batch // _TOKENS_PER_REQUEST
        rows = -(-(tokens_per_batch + requests + 2) // _ALIGNMENT) * _ALIGNMENT
        return Sizes(
            rows=rows,
            requests=requests,
            decoder_rows=int(rows * _DECODER_SHARE) if trimmed else rows,
            written=int(rows * _WRITTEN_SHARE),
            max_context=seq_len,
        )


class HostBatch(NamedTuple):
    """A training batch as numpy arrays; what a worker makes."""

    step: StepArrays
    decoder_rows: Int64Array  # [Td]
    loss_rows: Int64Array  # [M]
    targets: Int64Array  # [M]
    weights: npt.NDArray[np.float32]  # [M]
    encoder_sample: Int64Array  # [S]
    decoder_sample: Int64Array  # [S]
    engram_rows: dict[int, Int64Array]  # layer → [T, columns]
    replay_start: Int64Array  # [R]
    max_context: int

    def to(self, device: str) -> TrainingBatch:
        def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        ragged = self.step.to_torch(device, all_logits=True)
        ragged = replace(
            ragged,
            decoder_rows=tensor(self.decoder_rows),
            logit_rows=tensor(np.arange(len(self.decoder_rows))),
            max_context=self.max_context,
        )
        return TrainingBatch(
            ragged,
            tensor(self.loss_rows),
            tensor(self.targets),
            tensor(self.weights),
            tensor(self.encoder_sample),
            tensor(self.decoder_sample),
            {layer: tensor(rows) for layer, rows in self.engram_rows.items()},
            tensor(self.replay_start),
        )


class TrainingBatch(NamedTuple):
    """T rows of R conversations. `loss_rows` index the decoder rows."""

    ragged: RaggedBatch
    loss_rows: torch.Tensor  # [M] decoder rows whose next token the model writes
    targets: torch.Tensor  # [M] that token
    weights: torch.Tensor  # [M] float32, what its loss counts; 0 in padding
    encoder_sample: torch.Tensor  # [S] rows that teach the encoder's indexers
    decoder_sample: torch.Tensor  # [S] the same among the decoder rows
    engram_rows: dict[int, torch.Tensor]  # layer → [T, columns]
    # [R] position from which no window reaches further back, as after a prefix hit; 0 for none
    replay_start: torch.Tensor


def training_batch(
    batch: Batch,
    config: ModelConfig,
    engram: EngramHash,
    seed: int,
    *,
    trimmed: bool,
    replayed: float = 0.0,
    sizes: Sizes | None = None,
) -> HostBatch:
    """`trimmed`: the decoder runs from one window before the first written token on, as bounded
    replay does when serving; otherwise on all rows. `replayed`: the share of conversations whose
    windows begin anew before one of the answers, as if a prefix hit had ended there. `seed` draws
    these, and the rows that teach the indexers.

    Decoder rows and written tokens beyond `sizes` are left out; ValueError when the conversations
    themselves do not fit. Without `sizes` nothing is padded.
    """
    tokens, mask, query_start = _even(batch)
    tasks = list(batch.tasks)
    if sizes is not None:
        tokens, mask, query_start = _padded(tokens, mask, query_start, sizes)
        tasks += ["padding"] * (len(query_start) - 1 - len(tasks))
    num_rows, requests = len(tokens), len(query_start) - 1
    lengths = np.diff(query_start)
    first_written = np.array(
        [
            np.argmax(mask[start:end]) if mask[start:end].any() else end - start
            for start, end in pairwise(query_start)
        ]
    )
    floor = np.maximum(first_written - config.sliding_window, 0) if trimmed else 0 * first_written
    floor = floor.astype(np.int64)
    row = np.arange(num_rows) - np.repeat(query_start[:-1], lengths)
    decoder_rows = np.flatnonzero(row >= np.repeat(floor, lengths)).astype(np.int64)
    written = np.flatnonzero(mask).astype(np.int64)
    weight = np.array([_RETRIEVAL_WEIGHT if task == "retrieval" else 1.0 for task in tasks])
    weight = np.repeat(weight, lengths)[written].astype(np.float32)
    loss_rows = np.searchsorted(decoder_rows, written - 1).astype(np.int64)
    if sizes is not None:
        decoder_rows = _fitted(decoder_rows, sizes.decoder_rows, num_rows - 1)
        kept = loss_rows < sizes.decoder_rows
        written, weight, loss_rows = written[kept], weight[kept], loss_rows[kept]
        written = _fitted(written, sizes.written, 0)
        weight = _fitted(weight, sizes.written, 0.0)
        loss_rows = _fitted(loss_rows, sizes.written, 0)
    max_context = int(lengths.max()) if sizes is None else sizes.max_context
    # What must be found decides an answer, and few rows look for it: half of the sample is theirs.
    asking = np.zeros(num_rows, dtype=np.bool_)
    asking[written[weight == _RETRIEVAL_WEIGHT] - 1] = True
    rng = np.random.default_rng(seed)
    encoder_sample = _sample(rng, row, asking, config)
    decoder_sample = _sample(rng, row[decoder_rows], asking[decoder_rows], config)
    zeros = np.zeros(requests, dtype=np.int64)
    step = StepArrays(
        tokens=tokens,
        query_start=query_start,
        first_position=zeros,
        encoder_floor=zeros,
        decoder_floor=floor,
        write_floor=zeros,
        history=np.full((requests, config.engram_max_ngram_size - 1), -1, dtype=np.int32),
        wants_logits=np.zeros(requests, dtype=np.bool_),
    )
    return HostBatch(
        step=step,
        decoder_rows=decoder_rows,
        loss_rows=loss_rows,
        targets=tokens[written].astype(np.int64),
        weights=weight,
        encoder_sample=encoder_sample,
        decoder_sample=decoder_sample,
        engram_rows={layer: rows.numpy() for layer, rows in engram.rows(step.to_torch()).items()},
        replay_start=_replay_start(rng, mask, query_start, replayed, config.sliding_window),
        max_context=max_context,
    )


def _sample(
    rng: np.random.Generator, position: Int64Array, asking: BoolArray, config: ModelConfig
) -> Int64Array:
    """Random rows of a segment where something has to be left out, half of them asking; any rows
    where there are none of a kind."""
    crowded = (position + 1) // 2 > config.index_topk
    picked = []
    for wanted in (crowded, crowded & asking):
        rows = np.flatnonzero(wanted)
        rows = rows if len(rows) else np.arange(len(position))
        picked.append(rng.choice(rows, _NUM_SAMPLES // 2))
    return np.sort(np.concatenate(picked)).astype(np.int64)


def _replay_start(
    rng: np.random.Generator,
    mask: BoolArray,
    query_start: Int32Array,
    share: float,
    window: int,
) -> Int64Array:
    """Positions [R] one to three windows before an answer, where replay begins after a hit with
    pages of two windows; even, because entries of two positions are cached whole."""
    begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    result = np.zeros(len(query_start) - 1, dtype=np.int64)
    for request, (start, end) in enumerate(pairwise(query_start)):
        answers = begins[(begins >= start) & (begins < end)]
        if len(answers) and rng.random() < share:
            behind = rng.integers(window + 1, 3 * window, endpoint=True)
            result[request] = max(0, rng.choice(answers) - start - behind) // 2 * 2
    return result


def _fitted(values: npt.NDArray[N], size: int, filler: float) -> npt.NDArray[N]:
    missing = max(0, size - len(values))
    return np.pad(values[:size], (0, missing), constant_values=filler)


def _padded(
    tokens: Int32Array, mask: BoolArray, query_start: Int32Array, sizes: Sizes
) -> tuple[Int32Array, BoolArray, Int32Array]:
    """Fill up to `sizes` with a last conversation; requests after it have no rows."""
    room = sizes.rows - len(tokens)
    requests = sizes.requests - (len(query_start) - 1)
    if room < 2 or requests < 1:
        raise ValueError(
            f"expected fewer than {sizes.rows} rows of {sizes.requests} conversations, got "
            f"{len(tokens)} of {len(query_start) - 1}; draw smaller batches"
        )
    return (
        np.pad(tokens, (0, room), constant_values=PAD_ID),
        np.pad(mask, (0, room)),
        np.pad(query_start, (0, requests), constant_values=sizes.rows),
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
