"""One prompt through a network without a server: the reference forward, with and without replay.

outputs = run_forward(network, tokens, ForwardMode.BOTH, hit=40)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DraftBatch, Int32Array, RaggedBatch, StepArrays
from engine.config import ModelConfig
from engine.contiguous_cache import ContiguousCache
from engine.network.network import Network


class ForwardMode(StrEnum):
    FULL = "full"
    DECODER_REPLAY = "decoder-replay"
    ENCODER_REPLAY = "encoder-replay"
    BOTH = "both"

    @property
    def replays_encoder(self) -> bool:
        return self in (ForwardMode.ENCODER_REPLAY, ForwardMode.BOTH)

    @property
    def replays_decoder(self) -> bool:
        return self in (ForwardMode.DECODER_REPLAY, ForwardMode.BOTH)


@dataclass(frozen=True)
class Floors:
    """Where a request starts and what it may read and write; see engine/batch.py."""

    encoder: int
    decoder: int
    write: int


@torch.no_grad()
def run_forward(
    network: Network,
    tokens: npt.NDArray[np.integer[Any]],
    mode: ForwardMode,
    *,
    hit: int = 0,
    replay_length: int | None = None,
    quantize_cache: bool = True,
    chunk_rows: int = 512,
) -> dict[str, torch.Tensor]:
    """Run `tokens` [N] in steps of at most `chunk_rows` rows, on which no result depends.

    `hit`: length of the prefix whose global entries are taken as cached, 0 for none; only the
    encoder-replay modes take one. `replay_length` is the sliding window unless given. Returns

    * `logits` [rows, vocab]: rows of all positions (full), of the decoder's positions
      (decoder-replay, both: the last `replay_length`), or from `hit` on (encoder-replay);
    * `main_kv.L`, `index_k.L`: the entries of each KV source, dequantised;
    * `engram_rows.L` [N, columns], int64;
    * `draft_tokens`, `draft_confidence` [block], where the model drafts: one DSpark pass after
      the prompt, anchored at the argmax of the last row.

    Raises ValueError naming the argument that cannot be run.
    """
    config = network.config
    check_forward(config, tokens, mode, hit=hit, replay_length=replay_length, chunk_rows=chunk_rows)
    length = len(tokens)
    replay = config.sliding_window if replay_length is None else replay_length
    start = max(0, hit - replay)
    decoder_floor = max(start, length - replay) if mode.replays_decoder else start
    run = _Run(network, tokens.astype(np.int32), quantize_cache, chunk_rows)
    if hit:
        run.advance(0, hit, Floors(encoder=0, decoder=hit, write=0))
        run.forget_private()
    run.advance(start, length, Floors(encoder=start, decoder=decoder_floor, write=hit))
    first_logits = hit if mode is ForwardMode.ENCODER_REPLAY else decoder_floor
    return run.outputs(first_logits, decoder_floor)


def check_forward(
    config: ModelConfig,
    tokens: npt.NDArray[np.integer[Any]],
    mode: ForwardMode,
    *,
    hit: int = 0,
    replay_length: int | None = None,
    chunk_rows: int = 512,
) -> None:
    """Raise ValueError naming the argument that `run_forward` cannot run. Needs no weights."""
    length = len(tokens)
    if tokens.ndim != 1 or not 1 <= length <= config.max_position_embeddings:
        raise ValueError(
            f"tokens: expected 1 … {config.max_position_embeddings} ids in one dimension, "
            f"got shape {list(tokens.shape)}"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(
            f"tokens: expected ids 0 … {config.vocab_size - 1}, got {tokens.min()} … {tokens.max()}"
        )
    if mode.replays_encoder and not 0 <= hit < length:
        raise ValueError(
            f"hit: mode {mode} takes a cached prefix of 0 … {length - 1} tokens, got {hit}"
        )
    if not mode.replays_encoder and hit:
        raise ValueError(f"hit: mode {mode} starts cold, got {hit}; leave it out")
    if replay_length is not None and replay_length < 1:
        raise ValueError(f"replay_length: expected at least 1 row, got {replay_length}")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")


class _Run:
    """One request in slot 0 of a contiguous cache."""

    def __init__(
        self, network: Network, tokens: Int32Array, quantize: bool, chunk_rows: int
    ) -> None:
        config = network.config
        self._network = network
        self._tokens = tokens
        self._chunk_rows = chunk_rows
        self._cache = ContiguousCache(config, 1, len(tokens), network.dtype, quantize=quantize)
        self._engram = {
            layer: torch.full((len(tokens), config.engram_columns), -1)
            for layer in config.engram_layer_ids
        }
        self._logits: list[torch.Tensor] = []

    def forget_private(self) -> None:
        """Keep the global entries only, as a prefix hit does."""
        self._cache = self._cache.with_fresh_private()
        self._logits.clear()

    def advance(self, start: int, stop: int, floors: Floors) -> None:
        """Run positions start … stop − 1."""
        for first in range(start, stop, self._chunk_rows):
            batch = self._batch(first, min(first + self._chunk_rows, stop), floors)
            output = self._network.forward(batch, self._cache)
            self._logits.append(output.logits)
            if self._network.drafts:
                kept = batch.decoder_rows
                self._network.store_draft_context(
                    output.draft_features, batch.request[kept], batch.positions[kept], self._cache
                )
            for layer, rows in self._network.engram_hash.rows(batch).items():
                self._engram[layer][batch.positions] = rows

    def outputs(self, first_logits: int, decoder_floor: int) -> dict[str, torch.Tensor]:
        logits = torch.cat(self._logits)[first_logits - decoder_floor :]
        result = {"logits": logits}
        dtype = self._network.dtype
        for source in self._network.config.kv_source_layer_ids:
            entries = torch.arange(len(self._tokens) // self._network.config.ratio(source))
            result[f"main_kv.{source}"] = self._cache.main(source).read(entries, dtype)
            result[f"index_k.{source}"] = self._cache.index(source).read(entries, dtype)
        result.update({f"engram_rows.{layer}": rows for layer, rows in self._engram.items()})
        if self._network.drafts:
            draft = self._network.draft(
                DraftBatch(
                    anchors=logits[-1:].argmax(dim=-1),
                    positions=torch.tensor([len(self._tokens)]),
                    request=torch.tensor([0]),
                    floor=torch.tensor([decoder_floor]),
                ),
                self._cache,
            )
            result["draft_tokens"] = draft.tokens[0]
            result["draft_confidence"] = draft.confidence[0]
        return result

    def _batch(self, first: int, stop: int, floors: Floors) -> RaggedBatch:
        reach = self._network.config.engram_max_ngram_size - 1
        history = np.full((1, reach), -1, dtype=np.int32)
        known = self._tokens[max(0, first - reach) : first]
        history[0, reach - len(known) :] = known

        def one(value: int) -> npt.NDArray[np.int64]:
            return np.array([value], dtype=np.int64)

        return StepArrays(
            tokens=self._tokens[first:stop],
            query_start=np.array([0, stop - first], dtype=np.int32),
            first_position=one(first),
            encoder_floor=one(floors.encoder),
            decoder_floor=one(floors.decoder),
            write_floor=one(floors.write),
            history=history,
            wants_logits=np.array([True]),
        ).to_torch(all_logits=True)
